"""The ends of messages in a conversation that grew: looked for only where it grew.

What was found of a conversation holds for a longer one that begins with the same messages and the same text.
The messages behind that are rendered alone, with what little stands in front of them; if that text is the end
of the whole one, their ends are where they are in it.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from start_llm.core.errors import InvalidRequest
from start_llm.prompt.boundaries import Closers, Place, Render, Rendered, locate

_MOST_CONVERSATIONS = 16
_MOST_CHARACTERS = 16 * 2**20
_STEP = 4096
_WORTH = 32
"""Messages that need not be rendered once more: for less it is not worth its while."""


@dataclass(frozen=True, slots=True)
class _Found:
    rendered: Rendered
    places: Sequence[Place]


class PlaceFinder:
    """Remembers what it found. Safe to use from any thread."""

    def __init__(self, closers: Closers) -> None:
        self._closers = closers
        self._lock = threading.Lock()
        self._found: OrderedDict[str, _Found] = OrderedDict()

    def locate(self, rendered: Rendered, render: Render) -> list[Place]:
        """As `boundaries.locate` does."""
        places = self._grown(rendered, render)
        if places is None:
            places = locate(rendered, render, self._closers)
        self._keep(rendered, places)
        return places

    def _keep(self, rendered: Rendered, places: Sequence[Place]) -> None:
        with self._lock:
            self._found[rendered.text] = _Found(rendered, places)
            self._found.move_to_end(rendered.text)
            while len(self._found) > _MOST_CONVERSATIONS or sum(map(len, self._found)) > _MOST_CHARACTERS:
                self._found.popitem(last=False)

    def _grown(self, rendered: Rendered, render: Render) -> list[Place] | None:
        """None if nothing is known that would save anything."""
        known = self._known(rendered)
        index = {last: number for number, last in enumerate(rendered.lasts)}
        if not known or known[-1].message not in index:
            return None
        begun, asked = _begun(rendered, index[known[-1].message])
        if begun - asked < _WORTH:
            return None
        some = [*range(asked), *range(begun, len(rendered.messages))]
        behind = self._behind(rendered, some, known[-1], render)
        return None if behind is None else [*known, *behind]

    def _known(self, rendered: Rendered) -> Sequence[Place]:
        """Places of the longest beginning that is known, but for the last: what follows it is new."""
        with self._lock:
            found = list(self._found.values())
        longest: tuple[int, _Found | None] = 0, None
        for one in found:
            longest = max(longest, (_same_places(one, rendered.text), one), key=lambda pair: pair[0])
        count, one = longest
        if one is None:
            return ()
        pairs = zip(
            zip(one.rendered.messages, one.rendered.lasts, strict=True),
            zip(rendered.messages, rendered.lasts, strict=True),
            strict=False,
        )
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        last = rendered.lasts[same - 1] if same else -1
        return list(takewhile(lambda place: place.message < last, one.places[: count - 1]))

    def _behind(
        self, rendered: Rendered, some: Sequence[int], known: Place, render: Render
    ) -> list[Place] | None:
        """Places behind a known one. None if these messages alone are not rendered as in the whole."""
        messages = [rendered.messages[index] for index in some]
        try:
            text = render(messages)
        except InvalidRequest:
            return None
        moved = len(rendered.text) - len(text)
        if known.offset < moved or not rendered.text.endswith(text[known.offset - moved :]):
            return None
        alone = replace(
            rendered,
            messages=messages,
            lasts=[rendered.lasts[index] for index in some],
            text=text,
            tail=rendered.tail - moved,
        )
        places = locate(alone, render, self._closers)
        return [Place(one.message, one.offset + moved) for one in places if one.message > known.message]


def _same_places(found: _Found, text: str) -> int:
    """How many places at the beginning stand behind the same text."""
    same = _common(found.rendered.text, text)
    return bisect_right(found.places, same, key=lambda place: place.offset)


def _common(one: str, other: str) -> int:
    """How many characters at the beginning are the same: by steps, and then within the one that is not."""
    whole = min(len(one), len(other))
    parted = (at for at in range(0, whole, _STEP) if one[at : at + _STEP] != other[at : at + _STEP])
    at = next(parted, whole)
    rest = range(1, min(_STEP, whole - at) + 1)
    return at + bisect_left(rest, True, key=lambda count: one[at : at + count] != other[at : at + count])


def _begun(rendered: Rendered, last: int) -> tuple[int, int]:
    """Where the messages begin that are rendered alone, and how many at the beginning stand in front of them.

    They begin with a reply or a question at or before this one, and behind one that asks.
    """
    roles = [message["role"] for message in rendered.messages]
    begun = next((index for index in range(last, -1, -1) if roles[index] in ("user", "assistant")), 0)
    asked = next((index for index, role in enumerate(roles) if role == "user"), len(roles))
    return begun, min(asked + 1, begun)
