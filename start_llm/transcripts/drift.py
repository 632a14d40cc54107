"""What says how things are now has changed under what was computed: how the model is told.

What was computed keeps the old value. A *note* behind the last message that asks something tells the new one.
A value counts as told only where it stands in the tokens; what counts is where it stands last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from start_llm.core.canonical import LiveField, LiveValue
from start_llm.transcripts.lines import changed_lines

type Told = tuple[LiveField, str | None]
"""What a field was said to be; None: that it applies no longer."""

_MOST_TOKENS = 256
_SHARE_OF_SAVED = 0.1
_SHARE_OF_PROMPT = 0.1


@dataclass(frozen=True, slots=True)
class Change:
    """A field, and what it says now.

    Attributes:
        value: None if nothing says it any more.
        before: what was told of it last; None: nothing, or that it applies no longer.
    """

    field: LiveField
    value: LiveValue | None
    before: str | None = None

    @property
    def told(self) -> Told:
        return self.field, self.value.text if self.value else None

    @property
    def line(self) -> str:
        """Of a block the lines that changed, if that is shorter than the whole."""
        if self.value is None:
            return f"[No longer: {self.field.name}]"
        return min([f"[Now: {self.value.text}]", *self._difference(self.value.text)], key=len)

    def _difference(self, now: str) -> list[str]:
        if not self.field.is_block or self.before is None:
            return []
        lines = changed_lines(self.before, now)
        return [] if lines is None else [f"[Changed in {self.field.name}:\n{lines}\n]"]


def changes(told: Iterable[Sequence[Told]], live: Iterable[Sequence[LiveValue]]) -> list[Change]:
    """What the model would not know.

    Args:
        told: for each message what the tokens say.
        live: for each message what it says now.
    """
    last = dict(one for message in told for one in message)
    now = {value.field: value for message in live for value in message}
    new = [
        Change(field, value, last.get(field)) for field, value in now.items() if last.get(field) != value.text
    ]
    gone = [
        Change(field, None, text) for field, text in last.items() if field not in now and text is not None
    ]
    return [*new, *gone]


def values_of(live: Iterable[Sequence[LiveValue]]) -> tuple[tuple[Told, ...], ...]:
    """What messages say themselves."""
    return tuple(tuple((value.field, value.text) for value in message) for message in live)


def blocks(live: Iterable[Sequence[Told]]) -> dict[LiveField, str]:
    """What was said last of one project or chat, by messages or notes."""
    last = dict(one for message in live for one in message if one[0].is_block)
    return {field: text for field, text in last.items() if text is not None}


def note(told: Iterable[Change]) -> str:
    """One form for all, behind a message's own text."""
    return "\n\n" + "\n".join(change.line for change in told)


def pays(note_tokens: int, *, before: int, saved: int, prompt: int) -> bool:
    """A note is short beside what binding saves; and all of them beside the prompt, which is read anew else.

    Args:
        before: tokens of the notes that are there.
        saved: tokens of the fresh rendering that need not be computed.
        prompt: tokens in all.
    """
    is_short = note_tokens <= max(_MOST_TOKENS, _SHARE_OF_SAVED * saved)
    are_few = before + note_tokens <= max(_MOST_TOKENS, _SHARE_OF_PROMPT * prompt)
    return note_tokens < saved and is_short and are_few
