"""The ends of messages in a conversation that grew: looked for only where it grew.

What was found of a conversation holds for a longer one that begins with the same messages and the same text.
The messages behind that are rendered alone, with what little stands in front of them; if that text is the end
of the whole one, their ends are where they are in it. Where a system text or the first question is another
one, all that follows has moved by as many characters.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from start_llm.core.errors import InvalidRequest
from start_llm.prompt.boundaries import MARKINGS, Closers, Marking, Place, Render, Rendered, locate

_MOST_CONVERSATIONS = 16
_MOST_CHARACTERS = 16 * 2**20
_CHARACTERS, _MESSAGES = 4096, 64
"""That are compared at once."""
_WORTH = 32
"""Messages that need not be rendered once more: for less it is not worth its while."""


class _Found(NamedTuple):
    rendered: Rendered
    places: Sequence[Place]
    marking: Marking | None


class _Begun(NamedTuple):
    """The beginning of a conversation, or what follows its first question, as in a known one.

    Attributes:
        known: that one.
        places: in the conversation, of those messages.
        is_whole: all of the known one's messages are in it.
    """

    known: _Found
    places: Sequence[Place]
    is_whole: bool


class PlaceFinder:
    """Remembers what it found. Safe to use from any thread."""

    def __init__(self, closers: Closers) -> None:
        self._closers = closers
        self._lock = threading.Lock()
        self._found: OrderedDict[str, _Found] = OrderedDict()

    def locate(self, rendered: Rendered, render: Render) -> Sequence[Place]:
        """As `boundaries.locate` does."""
        with self._lock:
            known = list(self._found.values())
        for looked_for in (_begun_alike, self._asked_otherwise):
            begun = looked_for(known, rendered, render)
            behind = self._behind(rendered, begun, render) if begun else None
            if begun and behind is not None:
                found = _Found(rendered, [*begun.places, *behind], begun.known.marking)
                self._keep(found, begun.known if begun.is_whole else None)
                return found.places
        found = _Found(rendered, *locate(rendered, render, self._closers))
        self._keep(found, None)
        return found.places

    def _keep(self, found: _Found, instead_of: _Found | None) -> None:
        text = found.rendered.text
        with self._lock:
            if instead_of:
                self._found.pop(instead_of.rendered.text, None)
            self._found[text] = found
            self._found.move_to_end(text)
            while len(self._found) > _MOST_CONVERSATIONS or sum(map(len, self._found)) > _MOST_CHARACTERS:
                self._found.popitem(last=False)

    def _asked_otherwise(self, found: Sequence[_Found], rendered: Rendered, render: Render) -> _Begun | None:
        """Of a known conversation all that follows its first question, if that and no more differs.

        What stands up to there is rendered alone. The rest is as far behind it as it was. Where the first
        marking failed, that other beginning may be why, and nothing is known of this one.
        """
        count, marking = _asked(rendered), MARKINGS[0]
        alike = [one for one in found if one.marking is marking]
        is_worth_it = alike and len(rendered.messages) - count > _WORTH
        head = _alone(rendered, range(count), render) if is_worth_it else None
        places = locate(head, render, self._closers, [marking]).places if head else []
        if not head or not places or places[-1].message != rendered.lasts[count - 1]:
            return None
        if not rendered.text.startswith(head.text[: places[-1].offset]):
            return None
        begun = _longest(_of_same_text(one, rendered, places[-1]) for one in alike)
        return _of_same_messages(begun, rendered, count, places)

    def _behind(self, rendered: Rendered, known: _Begun, render: Render) -> list[Place] | None:
        """Places behind known ones. None if it is not worth it, or if these messages alone are not rendered,
        or cannot be marked, as in the whole."""
        place, marking = known.places[-1], known.known.marking
        if marking is None or place.message not in rendered.lasts:
            return None
        begun, asked = _begun(rendered, rendered.lasts.index(place.message))
        some = [*range(asked), *range(begun, len(rendered.messages))]
        alone = _alone(rendered, some, render) if begun - asked >= _WORTH else None
        if alone is None:
            return None
        moved = len(rendered.text) - len(alone.text)
        if place.offset < moved or not rendered.text.endswith(alone.text[place.offset - moved :]):
            return None
        located = locate(alone, render, self._closers, [marking])
        behind = [one for one in located.places if one.message > place.message]
        return [Place(one.message, one.offset + moved) for one in behind] if located.marking else None


def _alone(rendered: Rendered, some: Sequence[int], render: Render) -> Rendered | None:
    """Some of the messages; None if the template refuses them without the others."""
    messages = [rendered.messages[index] for index in some]
    try:
        text = render(messages)
    except InvalidRequest:
        return None
    tail = len(rendered.text) - rendered.tail
    return Rendered(messages, [rendered.lasts[index] for index in some], text, len(text) - tail)


def _begun_alike(
    found: Sequence[_Found],
    rendered: Rendered,
    render: Render,  # noqa: ARG001 - the form of a look
) -> _Begun | None:
    """A beginning that a known conversation has too; all of that, where the first marking failed: why it did
    may stand in the rest."""
    begun = _longest(_of_same_text(one, rendered, None) for one in found)
    begun = _of_same_messages(begun, rendered, 0, [])
    is_sure = begun and (begun.is_whole or begun.known.marking is MARKINGS[0])
    return begun if is_sure else None


def _longest(begun: Iterable[_Begun]) -> _Begun | None:
    return max(begun, key=lambda one: len(one.places), default=None)


def _of_same_text(one: _Found, rendered: Rendered, asked: Place | None) -> _Begun:
    """Places behind a question, or from the beginning on, as far as both texts go on alike.

    Args:
        asked: the end of the question, which may stand elsewhere in the known text.
    """
    start = asked.offset if asked else 0
    known = (
        next((place.offset for place in one.places if place.message == asked.message), None) if asked else 0
    )
    if known is None:
        return _Begun(one, (), is_whole=False)
    same = _common(one.rendered.text[known:], rendered.text[start:], _CHARACTERS)
    places = [place for place in one.places if known < place.offset <= known + same]
    return _Begun(
        one, [Place(place.message, place.offset - known + start) for place in places], is_whole=False
    )


def _of_same_messages(
    begun: _Begun | None, rendered: Rendered, first: int, places: Sequence[Place]
) -> _Begun | None:
    """Without the last of them, behind which something is new, and without those of other messages.

    Args:
        first: message that is compared.
        places: in front of it.
    """
    if not begun or not begun.places:
        return None
    was = begun.known.rendered
    same = min(
        _common(was.messages[first:], rendered.messages[first:], _MESSAGES),
        _common(was.lasts[first:], rendered.lasts[first:], _MESSAGES),
    )
    last = rendered.lasts[first + same - 1] if same else -1
    places = [*places, *(place for place in begun.places[:-1] if place.message < last)]
    return _Begun(begun.known, places, is_whole=first + same == len(was.messages)) if places else None


def _common[T](one: Sequence[T], other: Sequence[T], step: int) -> int:
    """How many items at the beginning are the same: by steps, and then within the one that is not."""
    whole = min(len(one), len(other))
    parted = (at for at in range(0, whole, step) if one[at : at + step] != other[at : at + step])
    at = next(parted, whole)
    rest = range(1, min(step, whole - at) + 1)
    return at + bisect_left(rest, True, key=lambda count: one[at : at + count] != other[at : at + count])


def _asked(rendered: Rendered) -> int:
    """How many messages there are up to the first question."""
    roles = (message["role"] for message in rendered.messages)
    return next((count for count, role in enumerate(roles, 1) if role == "user"), len(rendered.messages))


def _begun(rendered: Rendered, last: int) -> tuple[int, int]:
    """Where the messages begin that are rendered alone, and how many at the beginning stand in front of them.

    They begin with a reply or a question at or before this one, and behind one that asks.
    """
    back = range(last, -1, -1)
    begun = next((at for at in back if rendered.messages[at]["role"] in ("user", "assistant")), 0)
    return begun, min(_asked(rendered), begun)
