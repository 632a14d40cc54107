"""Replies that are damaged in one way or another, and what of them would harm an agent.

A part of them is read by `tests/output/test_damage.py`, all of them by `benchmarks/replies.py`.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise

import regex

from tests.output.corpus.case import Call, Case, Outcome, leaves, outcome_of, split
from tests.output.corpus.writers import Writer

WRITE = Call("write", {"path": "/a.txt", "text": "one\ntwo"})
READ = Call("read", {"path": "b", "limit": 2})
INTENDED = [value for call in (WRITE, READ) for value in call.arguments.values()]
_MARK = regex.compile(
    r"\]<\]minimax\[>\[<[^<>\n]{1,40}>|<!\[CDATA\[|\]\]>|<[^<>\n]{1,40}>|\[/?[A-Z_]{2,20}\]|[\[\]{}()\"',:]|\n"
)
_PUT_IN = ("<", ">", '"', "'", "{", "}", "[", "]", ",", "\n", "\\", "é")
_CONTROL = regex.compile(r"<\|(?:start|end|message|channel|call|return|constrain)\|>")

_ESCAPES = {
    "\n": "", "\\": "\\", "'": "'", '"': '"',
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v",
}  # fmt: skip
"""Of Python's texts."""

type Damage = Callable[[str], Iterator[str]]


def cuts(text: str) -> Iterator[str]:
    yield from (text[:end] for end in range(1, len(text)))


def without_a_character(text: str) -> Iterator[str]:
    yield from (text[:place] + text[place + 1 :] for place in range(len(text)))


def with_a_character_twice(text: str) -> Iterator[str]:
    yield from (text[: place + 1] + text[place:] for place in range(len(text)))


def with_two_characters_swapped(text: str) -> Iterator[str]:
    yield from (
        text[:place] + text[place + 1] + text[place] + text[place + 2 :] for place in range(len(text) - 1)
    )


def with_another_character(text: str) -> Iterator[str]:
    yield from (text[:place] + put_in + text[place:] for put_in in _PUT_IN for place in range(len(text)))


def spans(text: str) -> list[tuple[int, int]]:
    return [match.span() for match in _MARK.finditer(text)]


def without_a_mark(text: str) -> Iterator[str]:
    yield from (text[:start] + text[end:] for start, end in spans(text))


def without_two_marks(text: str) -> Iterator[str]:
    marks = spans(text)
    for index, (start, end) in enumerate(marks):
        for later, last in marks[index + 1 : index + 6]:
            yield text[:start] + text[end:later] + text[last:]


def with_a_mark_twice(text: str) -> Iterator[str]:
    yield from (text[:end] + text[start:] for start, end in spans(text))


def with_two_marks_swapped(text: str) -> Iterator[str]:
    marks = spans(text)
    for (start, end), (later, last) in pairwise(marks):
        yield text[:start] + text[later:last] + text[end:later] + text[start:end] + text[last:]


def with_a_line_twice(text: str) -> Iterator[str]:
    lines = text.splitlines(keepends=True)
    yield from ("".join([*lines[:place], lines[place], *lines[place:]]) for place in range(len(lines)))


def with_a_mark_of_others(text: str) -> Iterator[str]:
    for start, end in spans(text):
        yield from (text[:start] + mark + text[end:] for mark in _OTHER_MARKS)


def with_a_part_lost(text: str) -> Iterator[str]:
    """From one mark to another, as when tokens were lost."""
    places = spans(text)
    for start, _ in places:
        yield from (
            text[:start] + text[end:] for _, end in islice((span for span in places if span[0] > start), 8)
        )


DAMAGES: Mapping[str, Damage] = {
    "cut": cuts,
    "character lost": without_a_character,
    "character twice": with_a_character_twice,
    "characters swapped": with_two_characters_swapped,
    "character put in": with_another_character,
    "mark lost": without_a_mark,
    "two marks lost": without_two_marks,
    "mark twice": with_a_mark_twice,
    "marks swapped": with_two_marks_swapped,
    "line twice": with_a_line_twice,
    "mark of others": with_a_mark_of_others,
    "part lost": with_a_part_lost,
}
MANY = frozenset(
    {
        "two marks lost",
        "marks swapped",
        "mark of others",
        "part lost",
        "character put in",
        "characters swapped",
    }
)
"""Ways in which more than one thing is wrong, or something stands where nothing belongs."""
_OTHER_MARKS = (
    "<tool_call>", "</tool_call>", "</parameter>", "<function=read>", "</function>", "<|tool_call>",
    "<tool_call|>", '<|"|>', "<|tool_call_end|>", "<|channel|>", "<|call|>", "[TOOL_CALLS]", "<think>",
    "</think>", "```", "```json\n",
)  # fmt: skip


@dataclass
class Tally:
    """What was read in one notation."""

    outputs: int = 0
    calls: int = 0
    harms: Counter[str] = field(default_factory=Counter[str])
    examples: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def note(self, harm: str, text: str) -> None:
        self.harms[harm] += 1
        self.examples.append((harm, text))


def replies(writer: Writer) -> Iterator[str]:
    calls = writer.write([WRITE, READ])
    yield calls
    if writer.family.channels:
        yield f"<|channel|>analysis<|message|>Hm.<|end|>{calls}"
        yield f"{calls}<|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    else:
        yield f"<think>\nHm.\n</think>\n\n{calls}"
        yield f"I look.\n{calls}\n\nDone."


def outputs(writer: Writer, most: int = 0) -> Mapping[str, bool]:
    """Damaged replies, and whether each has a single damage: all of them, or at most so many."""
    damaged: dict[str, bool] = {}
    for name, damage in DAMAGES.items():
        for text in (text for reply in replies(writer) for text in damage(reply)):
            damaged[text] = damaged.get(text, False) or name not in MANY
    chosen = random.Random(7).sample(sorted(damaged), most) if most and len(damaged) > most else damaged
    return {text: damaged[text] for text in chosen}


def is_right(value: object, text: str) -> bool:
    """Whether a value is one that was meant, or words that stand so in the text."""
    words = json.dumps(value, ensure_ascii=False)[1:-1]
    return value in INTENDED or words in text or str(value) in _unescaped(text)


def _unescaped(text: str) -> str:
    """The text as it is, with line breaks for their escapes, and with Python's escapes read."""
    as_python = regex.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[0]), text, flags=regex.DOTALL)
    return "\0".join((text, text.replace("\\n", "\n"), as_python))


@dataclass(frozen=True)
class Tags:
    """Markup of a notation between the values of an undamaged reply.

    Attributes:
        beginning: tags that begin an argument or a call.
        end: the text behind a value.
        may_swallow: a value that has such tags in it has several readings.
    """

    beginning: regex.Pattern[str]
    end: regex.Pattern[str]
    may_swallow: bool = False

    @classmethod
    def of(cls, writer: Writer) -> Tags:
        if not writer.streams:
            return cls(_NOTHING, _NOTHING)
        text = writer.write([_SAMPLE])
        tags = {name: _tag_before(text, name, str(value)) for name, value in _SAMPLE.arguments.items()}
        between = text.partition(_SAMPLE.arguments["path"])[2].partition(tags["text"])[0].strip()
        end = regex.escape(between, literal_spaces=True).replace("path", r"\w+")
        beginning = "|".join(f"(?P<{name}>{regex.escape(tag)})" for name, tag in tags.items())
        wrapped = writer.write([WRITE])
        return cls(regex.compile(beginning), regex.compile(end), may_swallow="<![CDATA[" in wrapped)

    def is_swallowed(self, value: object) -> bool:
        """Whether a value has the tag of an argument in it."""
        return isinstance(value, str) and self.beginning.search(value) is not None

    def has_several_readings(self, name: str, value: object) -> bool:
        """Whether a value that has such a tag may end before it or not.

        It may begin again at a tag of its own, or quote it.
        """
        others = (tag for tag in self.beginning.finditer(str(value)) if tag.lastgroup != name)
        tag = next(others, None)
        return self.may_swallow or tag is None or self.end.search(str(value)[: tag.start()]) is not None


_MINIMAX = "]<]minimax[>["
_NOTHING = regex.compile(r"(?!)")
_SAMPLE = Call("write", {"path": "zq", "text": "vx", "limit": 97531})


def _tag_before(text: str, name: str, value: str) -> str:
    """The tag of the argument of this name and value."""
    given = text.index(value)
    place = text.rindex(name, 0, given)
    start = text.rindex("<", 0, place)
    if text.endswith(_MINIMAX, 0, start):
        start -= len(_MINIMAX)
    return text[start:given].rstrip("\n")


def check(writer: Writer, text: str, tally: Tally, tags: Tags, *, is_single: bool = True) -> None:
    """Read a text and note harms. `is_single`: one character, mark or line of a good reply is damaged."""
    tally.outputs += 1
    for complete in (True, False):
        case = Case(name="degenerate", text=text, family=writer.family, complete=complete)
        whole = split(case, [text])
        if split(case, text) != whole:
            tally.note("streamed", text)
        outcome = outcome_of(whole)
        tally.calls += outcome.ended if complete else 0
        if complete and outcome.open_call is not None:
            tally.note("open", text)
        if writer.family.channels and _CONTROL.search(outcome.content):
            tally.note("shown", text)
        _check_arguments(outcome, text, tally, tags if is_single else replace(tags, may_swallow=True))


def _check_arguments(outcome: Outcome, text: str, tally: Tally, tags: Tags) -> None:
    for _, arguments in outcome.closed_calls:
        try:
            value = json.loads(arguments)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            tally.note("invalid", text)
            continue
        values = [*leaves(value)]
        swallowed = [(name, part) for name, part in value.items() if tags.is_swallowed(part)]
        if not all(is_right(part, text) for part in values):
            tally.note("wrong", text)
        elif swallowed:
            is_open = all(tags.has_several_readings(name, part) for name, part in swallowed)
            tally.note("words" if is_open else "wrong", text)


HARMS = ("streamed", "open", "invalid", "wrong", "shown")
COUNTED = (*HARMS, "words")
