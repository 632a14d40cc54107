"""The law of malformed calls in every format: no wrong argument, and no open call at a reply's own end."""

import json
from collections.abc import Callable, Iterator

import pytest

from tests.output.corpus.case import Call, Case, leaves, outcome_of, split
from tests.output.corpus.writers import WRITERS

WRITE = Call("write", {"path": "/a.txt", "text": "one\ntwo"})
READ = Call("read", {"path": "b", "limit": 2})
INTENDED = [value for call in (WRITE, READ) for value in call.arguments.values()]


def beginnings(text: str) -> Iterator[str]:
    yield from (text[:end] for end in range(1, len(text)))


def without_a_character(text: str) -> Iterator[str]:
    yield from (text[:place] + text[place + 1 :] for place in range(len(text)))


def without_a_mark(text: str) -> Iterator[str]:
    yield from (text.replace(mark, "", 1) for mark in marks(text))


def with_a_mark_twice(text: str) -> Iterator[str]:
    yield from (text.replace(mark, mark + mark, 1) for mark in marks(text))


def with_a_line_twice(text: str) -> Iterator[str]:
    lines = text.splitlines(keepends=True)
    yield from ("".join([*lines[:place], lines[place], *lines[place:]]) for place in range(len(lines)))


def marks(text: str) -> list[str]:
    """Everything between angles, and every bracket."""
    found = [part.split(">", 1)[0] for part in text.split("<")[1:] if ">" in part]
    return [*dict.fromkeys(f"<{one}>" for one in found), *(one for one in "{}[]" if one in text)]


def is_right(value: object, text: str) -> bool:
    """Whether a value is one that was meant, or words that stand so in the text."""
    words = json.dumps(value, ensure_ascii=False).strip('"')
    return value in INTENDED or words in text or str(value) in text


@pytest.mark.checked(3)
@pytest.mark.sample(32)
@pytest.mark.parametrize("name", sorted(WRITERS))
@pytest.mark.parametrize(
    "changed", [beginnings, without_a_character, without_a_mark, with_a_mark_twice, with_a_line_twice]
)
def test_no_argument_of_a_malformed_call_is_another(name: str, changed: Callable[[str], Iterator[str]]):
    family = WRITERS[name].family
    for text in changed(WRITERS[name].write([WRITE, READ])):
        case = Case(name="changed", text=text, family=family)
        whole = split(case, [text])
        outcome = outcome_of(whole)
        assert outcome.open_call is None, text
        assert split(case, text) == whole, text
        for _, arguments in outcome.closed_calls:
            assert all(is_right(value, text) for value in leaves(json.loads(arguments))), (text, arguments)
