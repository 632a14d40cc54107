"""Tells the model about values that changed after their tokens were computed.

The computed tokens keep the old value. A *note* after the last message that asks something tells the new
one. If tokens hold several values of a field, the last one counts.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import NamedTuple

from start_llm.core.canonical import CanonicalMessage, Field
from start_llm.transcripts.guard import omitted_values
from start_llm.transcripts.recorded_details import MessageDetails, NotedValue

_MAX_LINES = 500
"""Comparison time grows with the square of the lines in the worst case."""
_MAX_CONTEXT = 3


def changed_lines(before: str, now: str) -> str | None:
    """Return the changed lines in a form like a unified diff, or None if no clear one exists.

    `-` marks a removed line, `+` a new line, ` ` an unchanged line before them. Each hunk begins with a line
    that occurs once in `before`, at most three lines above the change, so the hunks have only one meaning.
    None if a hunk has no such line or a text has more than 500 lines.
    """
    old, new = before.split("\n"), now.split("\n")
    if max(len(old), len(new)) > _MAX_LINES:
        return None
    lines: list[str] = []
    free = 0
    for kind, first, end, start, stop in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        place = _beginning(old, max(free, first - _MAX_CONTEXT), first, end)
        if place is None:
            return None
        lines += [f" {line}" for line in old[place:first]]
        lines += [f"-{line}" for line in old[first:end]] + [f"+{line}" for line in new[start:stop]]
        free = end
    return "\n".join(lines)


def _beginning(old: Sequence[str], earliest: int, first: int, end: int) -> int | None:
    """Return the index of the last line up to `first` that occurs once: there the hunk begins."""
    places = range(min(first, end - 1), earliest - 1, -1)
    return next((place for place in places if old.count(old[place]) == 1), None)


_MAX_TOKENS = 256
_SHARE_OF_SAVED = 0.1
_SHARE_OF_PROMPT = 0.1
_SECONDS = re.compile(r"(\b\d{1,2}:\d{2}):\d{2}(?:\.\d+)?\b")


@dataclass(frozen=True, slots=True)
class Change:
    """A field and its current value.

    Attributes:
        value: None if no message has the field any more.
        before: value that the tokens gave last; None: none, or that the field no longer applies.
    """

    field: Field
    value: str | None
    before: str | None = None

    @property
    def noted(self) -> NotedValue:
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


class _LastValue(NamedTuple):
    """What tokens say last of a field; `text` is None if a note said that it no longer applies."""

    text: str | None
    is_own: bool


def changes(
    details: Iterable[MessageDetails], messages: Sequence[CanonicalMessage], *, proven: int = -1
) -> list[Change]:
    """Return the changes that the model would not learn from the tokens.

    Args:
        details: for each message, what the tokens say.
        messages: the messages as they are now.
        proven: index of the last message whose tokens are proven to be the conversation's own. What they say
            of a clock holds until the minute changes. Others may be of another conversation: there a second
            is a difference.
    """
    last: dict[Field, _LastValue] = {}
    for depth, reading in enumerate(details):
        values = {**omitted_values(depth, reading.omitted), **dict(reading.noted)}
        last |= {field: _LastValue(text, depth <= proven) for field, text in values.items()}
    now: dict[Field, str] = {}
    for depth, message in enumerate(messages):
        now |= omitted_values(depth, message.omitted)
    new = [
        Change(field, value, last[field].text if field in last else None)
        for field, value in now.items()
        if field not in last or not _is_known(field, value, last[field])
    ]
    gone = [
        Change(field, None, text)
        for field, (text, _) in last.items()
        if field not in now and text is not None and field.kind != "own"
    ]
    return [*new, *gone]


def _new_lines(before: str, now: str) -> str | None:
    """Return the lines that are new; None if the others stand in another order, or more often."""
    old, new = before.split("\n"), now.split("\n")
    known = set(old)
    rest = iter(old)
    if not all(line in rest for line in new if line in known):
        return None
    return "\n".join(line for line in new if line not in known)


def _is_known(field: Field, now: str, last: _LastValue) -> bool:
    """Return whether the tokens tell this value. Lines removed from an `own` field need no note."""
    if last.text is None or now == last.text:
        return now == last.text
    if field.kind == "own":
        return _new_lines(last.text, now) == ""
    return last.is_own and field.kind == "live" and _to_the_minute(now) == _to_the_minute(last.text)


def _to_the_minute(text: str) -> str:
    return _SECONDS.sub(r"\1", text)


def note(changed: Iterable[Change]) -> str:
    """Return the text of a note, in one form for all templates, to be put after a message's own text."""
    return "\n\n" + "\n".join(change.line for change in changed)


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
