"""A long reply costs no more for each token than a short one: nothing is copied again and again.

Counted, not timed: what has to be kept is kept piece by piece, so no text that a splitter holds grows with
the reply. `benchmarks/replies.py` has the times.
"""

import gc
import sys
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType

import pytest

from benchmarks import replies as benchmark
from start_llm.core.family import Family
from start_llm.formats.registry import family_by_name
from start_llm.output.calls import QuoteWatch
from start_llm.output.splitter import make_splitter
from tests.output.corpus.case import TOOLS
from tests.output.corpus.writers import HARMONY, WRITERS
from tests.output.replies import FAMILIES

pytestmark = pytest.mark.sample(3)

TOKENS = 2_000
MAX_LETTERS = 500
"""Longer than any marker or pattern, much shorter than a reply."""
LETTERS = 20_000
MAX_CALLS_OF_THE_END = 2.5
"""Calls of functions for each character of an unclosed call of 40 kB, of which four fifths are read again."""
_SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType)


def longest_text(root: object) -> int:
    """Length of the longest text that an object holds, itself or through others."""
    seen: set[int] = set()
    waiting: list[object] = [root]
    longest = 0
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, _SHARED):
            continue
        seen.add(id(item))
        longest = max(longest, len(item) if isinstance(item, str) else 0)
        waiting += gc.get_referents(item)
    return longest


def _beginning(name: str) -> str:
    """A call up to the middle of its last argument."""
    return WRITERS[name].call("write", text="\0").partition("\0")[0]


_QWEN = WRITERS["qwen_xml"].family
REPLIES: Mapping[str, tuple[Family, str, str]] = {
    "prose": (_QWEN, "", "so it"),
    "prose with angles": (_QWEN, "", "a < b"),
    "reasoning": (_QWEN, "<think>", "so it"),
    "an argument in reasoning": (_QWEN, "<think><tool_call><function=read><parameter=path>", "so it"),
    "an object in reasoning": (_QWEN, '<think><tool_call>{"name": "', "so it"),
    "line breaks after a call in reasoning": (_QWEN, f"<think>{WRITERS['hermes'].call('list')}", "\n\n\n\n"),
    "assumed reasoning": (FAMILIES["glm4"], "", "so it"),
    "line breaks": (_QWEN, "", "\n\n\n\n"),
    "line breaks in an answer": (_QWEN, "Yes", "\n\n\n\n"),
    "line breaks in reasoning": (_QWEN, "<think>Hm", "\n\n\n\n"),
    "line breaks after an opener": (_QWEN, "<tool_call>", "\n\n\n\n"),
    "line breaks after a call": (_QWEN, WRITERS["hermes"].call("list"), "\n\n\n\n"),
    "line breaks between arguments": (_QWEN, "<tool_call><function=read>", "\n\n\n\n"),
    "line breaks in an object": (_QWEN, '<tool_call>{"name":', "\n\n\n\n"),
    "line breaks before a header": (HARMONY, "", "\n\n\n\n"),
    "line breaks in a header": (HARMONY, "<|start|>", "\n\n\n\n"),
    "a message": (HARMONY, "<|channel|>final<|message|>", "so it"),
    "an object that is no call": (_QWEN, '{"lines": "', "so it"),
    "a value that is no text": (_QWEN, "<tool_call><function=typed><parameter=tags>", "1, 2,"),
    "a value in a tool that was not offered": (_QWEN, "<tool_call><function=x><parameter=a>", "so it"),
    "ends of values in a value": (_QWEN, "<tool_call><function=read><parameter=path>", "</parameter> "),
    **{
        f"an argument, {name}": (writer.family, _beginning(name), "so it") for name, writer in WRITERS.items()
    },
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", REPLIES)
def test_no_text_that_is_held_grows_with_the_reply(name):
    family, beginning, piece = REPLIES[name]
    splitter = make_splitter(family, TOOLS, reasoning_is_open=False, thinking=True)
    splitter.feed(beginning)
    for _ in range(TOKENS):
        splitter.feed(piece)
    assert longest_text(vars(splitter)) <= MAX_LETTERS


def test_a_text_that_grows_would_be_found():
    class Holder:
        def __init__(self) -> None:
            self.inner = {"a": [("b", "x" * 600)]}

    assert longest_text(Holder()) >= 600


def calls_in(action: Callable[[], object]) -> int:
    """Number of functions, Python's and the library's, that an action calls."""
    made = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal made
        made += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return made


def _calls_of_the_end(name: str, letters: int) -> int:
    family, unit, last = benchmark.UNCLOSED[name]
    splitter = make_splitter(family_by_name(family), benchmark.TOOLS, reasoning_is_open=False, thinking=True)
    text = unit * (letters // len(unit)) + last
    for start in range(0, len(text), 4):
        splitter.feed(text[start : start + 4])
    return calls_in(lambda: splitter.close(complete=True))


@pytest.mark.thorough
@pytest.mark.parametrize("name", benchmark.UNCLOSED)
def test_the_end_of_an_unclosed_call_takes_work_in_proportion_to_its_length(name):
    short, long = _calls_of_the_end(name, LETTERS), _calls_of_the_end(name, 2 * LETTERS)
    assert long <= 2.2 * short + 200
    assert long <= MAX_CALLS_OF_THE_END * 2 * LETTERS


def test_releasing_line_breaks_takes_no_work_for_each_of_them():
    assert calls_in(lambda: QuoteWatch().note("\n" * LETTERS)) < 20
