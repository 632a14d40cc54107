"""Tells the model about values that changed after their tokens were computed.

The computed tokens keep the old value. A *note* after the last message that asks something tells the new
one. If tokens hold several values of a field, the last one counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from start_llm.core.canonical import CanonicalMessage, Field
from start_llm.transcripts.guard import MessageDetails, NotedValue, omitted_values
from start_llm.transcripts.text_diff import changed_lines

_MAX_TOKENS = 256
_SHARE_OF_SAVED = 0.1
_SHARE_OF_PROMPT = 0.1


@dataclass(frozen=True, slots=True)
class Change:
    """A field and its current value.

    Attributes:
        value: None if no message has the field any more.
        before: value that the tokens told last; None: none, or that the field no longer applies.
    """

    field: Field
    value: str | None
    before: str | None = None

    @property
    def told(self) -> NotedValue:
        return self.field, self.value

    @property
    def line(self) -> str:
        """The note's line for this change: the whole value, or only its changed lines if that is shorter."""
        if self.value is None:
            return f"[No longer: {self.field.name}]"
        return min([f"[Now: {self.value}]", *self._difference(self.value)], key=len)

    def _difference(self, now: str) -> list[str]:
        if self.before is None or self.field.kind == "live":
            return []
        lines = _new_lines(self.before, now) if self.field.kind == "own" else changed_lines(self.before, now)
        return [] if lines is None else [f"[Changed in {self.field.name}:\n{lines}\n]"]


def changes(details: Iterable[MessageDetails], messages: Sequence[CanonicalMessage]) -> list[Change]:
    """Return the changes that the model would not learn from the tokens.

    Args:
        details: for each message, what the tokens say.
        messages: the messages as they are now.
    """
    last: dict[Field, str | None] = {}
    for depth, reading in enumerate(details):
        last |= omitted_values(depth, reading.omitted)
        last |= dict(reading.told)
    now: dict[Field, str] = {}
    for depth, message in enumerate(messages):
        now |= omitted_values(depth, message.omitted)
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
    """Return whether the tokens tell this value. Lines removed from an `own` field need no note."""
    if field.kind == "own" and told is not None:
        return not _new_lines(told, now)
    return now == told


def note(told: Iterable[Change]) -> str:
    """Return the text of a note, in one form for all templates, to be put after a message's own text."""
    return "\n\n" + "\n".join(change.line for change in told)


def is_worth_telling(note_tokens: int, *, before: int, saved: int, prompt: int) -> bool:
    """Return whether a note costs less than it saves.

    The note must be short compared with what binding saves, and all notes together short compared with the
    prompt; otherwise the prompt is rendered fresh.

    Args:
        note_tokens: tokens of the new note.
        before: tokens of the notes that the prefix already has.
        saved: tokens of the fresh rendering that need not be computed.
        prompt: tokens of the whole prompt.
    """
    is_short = note_tokens <= max(_MAX_TOKENS, _SHARE_OF_SAVED * saved)
    are_few = before + note_tokens <= max(_MAX_TOKENS, _SHARE_OF_PROMPT * prompt)
    return note_tokens < saved and is_short and are_few
