"""What says how things are now has changed under what was computed: how the model is told.

What was computed keeps the old value. A *note* behind the last message that asks something tells the new one.
A value counts as told only where it stands in the tokens; what counts is where it stands last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from start_llm.core.canonical import CanonicalMessage, Field
from start_llm.transcripts.guard import Reading, Told, said_of
from start_llm.transcripts.lines import changed_lines

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

    field: Field
    value: str | None
    before: str | None = None

    @property
    def told(self) -> Told:
        return self.field, self.value

    @property
    def line(self) -> str:
        """The lines that changed, if that is shorter than the whole."""
        if self.value is None:
            return f"[No longer: {self.field.name}]"
        return min([f"[Now: {self.value}]", *self._difference(self.value)], key=len)

    def _difference(self, now: str) -> list[str]:
        if self.before is None or self.field.kind == "live":
            return []
        lines = _new_lines(self.before, now) if self.field.kind == "own" else changed_lines(self.before, now)
        return [] if lines is None else [f"[Changed in {self.field.name}:\n{lines}\n]"]


def changes(readings: Iterable[Reading], messages: Sequence[CanonicalMessage]) -> list[Change]:
    """What the model would not know.

    Args:
        readings: of each message, what the tokens say.
        messages: as they are now.
    """
    last: dict[Field, str | None] = {}
    for depth, reading in enumerate(readings):
        last |= said_of(depth, reading.omitted)
        last |= dict(reading.told)
    now: dict[Field, str] = {}
    for depth, message in enumerate(messages):
        now |= said_of(depth, message.omitted)
    new = [
        Change(field, value, last.get(field))
        for field, value in now.items()
        if not _is_known(field, value, last.get(field))
    ]
    gone = [
        Change(field, None, text)
        for field, text in last.items()
        if field not in now and text is not None and field.kind != "own"
    ]
    return [*new, *gone]


def _new_lines(before: str, now: str) -> str:
    old = set(before.split("\n"))
    return "\n".join(line for line in now.split("\n") if line not in old)


def _is_known(field: Field, now: str, told: str | None) -> bool:
    """Of what a message says of itself, lines that are gone are no news."""
    if field.kind == "own" and told is not None:
        return not _new_lines(told, now)
    return now == told


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
