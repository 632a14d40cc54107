"""The law of malformed calls in every format: no wrong argument, and no open call at a reply's own end."""

import json
from collections.abc import Callable, Iterator

import pytest

from tests.output.corpus.case import Case, leaves, outcome_of, split
from tests.output.corpus.damage import (
    INTENDED,
    READ,
    WRITE,
    cuts,
    with_a_line_twice,
    without_a_character,
)
from tests.output.corpus.writers import WRITERS


def without_a_mark(text: str) -> Iterator[str]:
    yield from (text.replace(mark, "", 1) for mark in marks(text))


def with_a_mark_twice(text: str) -> Iterator[str]:
    yield from (text.replace(mark, mark + mark, 1) for mark in marks(text))


def marks(text: str) -> list[str]:
    """Everything between angles, and every bracket."""
    tags = [part.split(">", 1)[0] for part in text.split("<")[1:] if ">" in part]
    return [*dict.fromkeys(f"<{mark}>" for mark in tags), *(mark for mark in "{}[]" if mark in text)]


def is_right(value: object, text: str) -> bool:
    """Whether a value is one that was meant, or words that stand so in the text."""
    words = json.dumps(value, ensure_ascii=False).strip('"')
    return value in INTENDED or words in text or str(value) in text


@pytest.mark.sample(256)
@pytest.mark.parametrize("name", sorted(WRITERS))
@pytest.mark.parametrize(
    "changed", [cuts, without_a_character, without_a_mark, with_a_mark_twice, with_a_line_twice]
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
