"""The values that a client changes: a date, lines of a block, lines of its project's instructions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from start_llm.core.chat import Message
from tests.transcripts.notes import known
from tests.transcripts.world import (
    BLOCK,
    BLOCK_FORM,
    DATE,
    INSTRUCTIONS,
    INSTRUCTIONS_FORM,
    REMINDER,
    day,
    words,
)


@dataclass(frozen=True)
class Now:
    """Each is a word, or some; where there is none, nothing is said of it.

    Attributes:
        date, block: in the system message.
        rules: in a reminder of the first question.
        reminds: there is one, whether or not it has rules.
    """

    date: str = ""
    block: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    reminds: bool = False

    @property
    def words(self) -> set[str]:
        return {self.date, *self.block, *(self.rules if self.reminds else ())}

    @property
    def system(self) -> str:
        date = DATE.format(day(self.date)) if self.date else ""
        return date + (BLOCK.format('",\n  "'.join(self.block)) if self.block else "")

    @property
    def reminder(self) -> str:
        rules = INSTRUCTIONS.format("\n".join(self.rules)) if self.rules else ""
        return REMINDER.format(rules, "2026-11-21") if self.reminds else ""

    def other(self, random: Random, word: Callable[[str], str]) -> Now:
        """Another date; lines that change, come, go and come twice; or none."""
        return Now(
            date=word("d") if random.random() < 0.7 else "",
            block=_other(self.block, random, lambda: word("k")),
            rules=_other(self.rules, random, lambda: word("r")),
            reminds=self.reminds,
        )


def _other(lines: Sequence[str], random: Random, word: Callable[[], str]) -> tuple[str, ...]:
    kept = [line for line in lines if random.random() < 0.8]
    for line in [random.choice((*lines, word())) for _ in range(random.randrange(3))]:
        kept.insert(random.randint(0, len(kept)), line)
    return tuple(kept) if random.random() < 0.7 else ()


def check_now(read: str, messages: Sequence[Message]) -> None:
    """The last value that is said must be the present one."""
    first = messages[0].content
    now, dates = words(first, "d"), words(read, "d")
    if now:
        assert dates[-1:] == now, "not the newest"
    elif dates:
        assert "[No longer: today's date]" in read[read.rindex(day(dates[-1])) :], "no longer so"
    assert known(read, "inbound context", BLOCK_FORM) == _first_match(BLOCK_FORM, first), "not as it is"
    asked = next((message.content for message in messages if message.role == "user"), "")
    assert known(read, "project instructions", INSTRUCTIONS_FORM) == _first_match(INSTRUCTIONS_FORM, asked), (
        "not as it is"
    )


def _first_match(form: str, text: str) -> str | None:
    match = re.search(form, text)
    return match and match[0]
