"""Finds the ends of messages in a conversation that grew, looking only at its new part.

The ends found in a conversation hold for a longer one that begins with the same messages and the same text.
The messages after that beginning are rendered alone, with as few as possible before them. If this text
is the end of the whole text, the ends in it hold for the whole. If only a system text or the first question
differs, everything after it has moved by the same number of characters.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from start_llm.core.common_beginning import common_length
from start_llm.core.errors import InvalidRequest
from start_llm.prompt.boundaries import MARKINGS, Marking, MessageEnd, Render, Rendered, TurnClosers, locate

_MAX_CONVERSATIONS = 16
_MAX_CHARACTERS = 16 * 2**20
_CHARACTERS = 4096
"""Characters that are compared at once."""
_WORTH = 32
"""Minimum number of messages that are spared a second rendering: below it this does not pay."""


class _GrownPrompt(NamedTuple):
    rendered: Rendered
    places: Sequence[MessageEnd]
    marking: Marking | None


class _KnownPrefix(NamedTuple):
    """A part of a conversation that a known one has too: its beginning, or what follows its first question.

    Attributes:
        places: ends of the part's messages, as offsets in the new conversation.
        is_whole: the part holds all messages of the known conversation.
    """

    known: _GrownPrompt
    places: Sequence[MessageEnd]
    is_whole: bool


class MessageEndFinder:
    """Finds the ends of messages and remembers them. Safe to use from any thread."""

    def __init__(self, closers: TurnClosers) -> None:
        self._closers = closers
        self._lock = threading.Lock()
        self._known: OrderedDict[str, _GrownPrompt] = OrderedDict()

    def locate(self, rendered: Rendered, render: Render) -> Sequence[MessageEnd]:
        """Return the ends that `boundaries.locate` would return."""
        with self._lock:
            known = list(self._known.values())
        for search in (_begun_alike, self._asked_otherwise):
            begun = search(known, rendered, render)
            after = self._after(rendered, begun, render) if begun else None
            if begun and after is not None:
                prompt = _GrownPrompt(rendered, [*begun.places, *after], begun.known.marking)
                self._keep(prompt, begun.known if begun.is_whole else None)
                return prompt.places
        prompt = _GrownPrompt(rendered, *locate(rendered, render, self._closers))
        self._keep(prompt, None)
        return prompt.places

    def _keep(self, prompt: _GrownPrompt, instead_of: _GrownPrompt | None) -> None:
        text = prompt.rendered.text
        with self._lock:
            if instead_of:
                self._known.pop(instead_of.rendered.text, None)
            self._known[text] = prompt
            self._known.move_to_end(text)
            while len(self._known) > _MAX_CONVERSATIONS or sum(map(len, self._known)) > _MAX_CHARACTERS:
                self._known.popitem(last=False)

    def _asked_otherwise(
        self, prompts: Sequence[_GrownPrompt], rendered: Rendered, render: Render
    ) -> _KnownPrefix | None:
        """Return the known rest of a conversation that differs only up to its first question.

        The part up to the first question is rendered alone; the rest follows it unchanged. Known
        conversations for which the first marking failed are not used: their own beginning may be the reason.
        """
        count, marking = _asked(rendered), MARKINGS[0]
        alike = [prompt for prompt in prompts if prompt.marking is marking]
        is_worth_it = alike and len(rendered.messages) - count > _WORTH
        head = _alone(rendered, range(count), render) if is_worth_it else None
        places = locate(head, render, self._closers, [marking]).places if head else []
        if not head or not places or places[-1].message != rendered.lasts[count - 1]:
            return None
        if not rendered.text.startswith(head.text[: places[-1].offset]):
            return None
        begun = _longest(_of_same_text(prompt, rendered, places[-1]) for prompt in alike)
        return _of_same_messages(begun, rendered, count, places)

    def _after(self, rendered: Rendered, known: _KnownPrefix, render: Render) -> list[MessageEnd] | None:
        """Return the ends after the known ones.

        None if this would not pay, or if the messages alone are not rendered, or cannot be marked, as in the
        whole.
        """
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
        after = [end for end in located.places if end.message > place.message]
        return [MessageEnd(end.message, end.offset + moved) for end in after] if located.marking else None


def _alone(rendered: Rendered, some: Sequence[int], render: Render) -> Rendered | None:
    """Render some of the messages; None if the template refuses them without the others."""
    messages = [rendered.messages[index] for index in some]
    try:
        text = render(messages)
    except InvalidRequest:
        return None
    tail = len(rendered.text) - rendered.tail
    return Rendered(messages, [rendered.lasts[index] for index in some], text, len(text) - tail)


def _begun_alike(
    prompts: Sequence[_GrownPrompt],
    rendered: Rendered,
    render: Render,  # noqa: ARG001 - both ways to look have this signature
) -> _KnownPrefix | None:
    """Return the beginning that a known conversation has too.

    If the first marking failed for the known one, all of it must be in the new one: the reason for the
    failure may be in the rest.
    """
    begun = _longest(_of_same_text(prompt, rendered, None) for prompt in prompts)
    begun = _of_same_messages(begun, rendered, 0, [])
    is_sure = begun and (begun.is_whole or begun.known.marking is MARKINGS[0])
    return begun if is_sure else None


def _longest(begun: Iterable[_KnownPrefix]) -> _KnownPrefix | None:
    return max(begun, key=lambda prefix: len(prefix.places), default=None)


def _of_same_text(prompt: _GrownPrompt, rendered: Rendered, asked: MessageEnd | None) -> _KnownPrefix:
    """Return the known ends as far as both texts are equal, from a question or from the beginning on.

    Args:
        asked: end of the question, which may have another offset in the known text; None: from the beginning
            on.
    """
    start = asked.offset if asked else 0
    known = (
        next((place.offset for place in prompt.places if place.message == asked.message), None)
        if asked
        else 0
    )
    if known is None:
        return _KnownPrefix(prompt, (), is_whole=False)
    same = common_length(prompt.rendered.text[known:], rendered.text[start:], _CHARACTERS)
    places = [place for place in prompt.places if known < place.offset <= known + same]
    return _KnownPrefix(
        prompt, [MessageEnd(place.message, place.offset - known + start) for place in places], is_whole=False
    )


def _of_same_messages(
    begun: _KnownPrefix | None, rendered: Rendered, first: int, places: Sequence[MessageEnd]
) -> _KnownPrefix | None:
    """Keep the ends of messages that are equal in both, except the last: after it the text is new.

    Args:
        first: index of the first message to compare.
        places: ends before it.
    """
    if not begun or not begun.places:
        return None
    was = begun.known.rendered
    same = min(
        common_length(was.messages[first:], rendered.messages[first:]),
        common_length(was.lasts[first:], rendered.lasts[first:]),
    )
    last = rendered.lasts[first + same - 1] if same else -1
    places = [*places, *(place for place in begun.places[:-1] if place.message < last)]
    return _KnownPrefix(begun.known, places, is_whole=first + same == len(was.messages)) if places else None


def _asked(rendered: Rendered) -> int:
    """Return the number of messages up to the first question."""
    roles = (message["role"] for message in rendered.messages)
    return next((count for count, role in enumerate(roles, 1) if role == "user"), len(rendered.messages))


def _begun(rendered: Rendered, last: int) -> tuple[int, int]:
    """Return the index from which messages are rendered alone, and how many first messages precede them.

    They begin with the last reply or question up to index `last`, and follow the first question.
    """
    back = range(last, -1, -1)
    begun = next((at for at in back if rendered.messages[at]["role"] in ("user", "assistant")), 0)
    return begun, min(_asked(rendered), begun)
