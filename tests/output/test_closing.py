"""Text that looks like calls and is none costs work in proportion to its length, in every format.

Counted, not timed: what readers are given, and how often one is made. `benchmarks/replies.py` has the times.
"""

import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.formats.reading.block import BlockReader
from start_llm.output import rereading
from start_llm.output.splitter import make_splitter
from tests.output.corpus.case import TOOLS, Case, outcome_of, split
from tests.output.corpus.writers import WRITERS
from tests.output.replies import FAMILIES, pieces_of

LETTERS = 5_000
_ARGUMENTS = '{"name": "read", "arguments": '
UNITS: Mapping[str, str] = {
    "half an opener": "<tool_ca",
    "an opener": "<tool_call>",
    "an object, Hermes": f"<tool_call>\n{_ARGUMENTS}{{",
    "a string, Hermes": '<tool_call>{"name": "',
    "a list, Hermes": '<tool_call>{"name": [[[',
    "no JSON, Hermes": "<tool_call>{!",
    "no member, Hermes": '<tool_call>{"a": [TOOL_CALLS][{',
    "a function": "<tool_call>\n<function=read>\n",
    "a function's head": "<function=",
    "a function that is not offered": "<tool_call>\n<function=x>\n<parameter=a>\nx\n</parameter>\n",
    "a bare function that is not offered": "<function=x><parameter=a>",
    "ends of values": "<function=x><parameter=a></parameter>",
    "a tagged object": "<function=read>{",
    "a tagged list": '<function=read>{"a": [',
    "a function of MiniCPM that is not offered": '<function name="x"><param name="a">',
    "CDATA": '<function name="x"><param name="a"><![CDATA[',
    "a call of GLM that is not offered": "<tool_call>x\n<arg_key>path</arg_key>\n<arg_value>",
    "ends of values, GLM": "<tool_call>x<arg_key>a</arg_key><arg_value></arg_value>x",
    "a list, Mistral": '[TOOL_CALLS][{"name":',
    "an object, Mistral": "[TOOL_CALLS][{",
    "a string, Mistral": '[TOOL_CALLS][{"name": "',
    "a head, Mistral": "[TOOL_CALLS]read[ARGS]{",
    "a section, Kimi": "<|tool_calls_section_begin|><|tool_call_begin|>read:0<|tool_call_argument_begin|>{",
    "a string, Kimi": '<|tool_call_begin|>read:0<|tool_call_argument_begin|>{"a": "',
    "an object, Gemma": "<|tool_call>call:x{",
    "a text, Gemma": '<|tool_call>call:read{path:<|"|>',
    "brackets, Gemma": f"<|tool_call>call:x{{{'{}' * 40}",
    "a call of MiniMax that is not offered": '<minimax:tool_call><invoke name="x"><parameter name="a">',
    "a head, MiniMax": '<minimax:tool_call><invoke name="',
    "a call of DSML that is not offered": '<｜DSML｜tool_calls><｜DSML｜invoke name="x">'
    '<｜DSML｜parameter name="a" string="true">',
    "a head, DSML": "<｜DSML｜ calls><｜DSML｜ invoke ",
    "a function of Seed that is not offered": "<seed:tool_call><function=x><parameter=a>",
    "a section, DeepSeek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>read<｜tool▁sep｜>{",
    "a fence, DeepSeek": '<｜tool▁call▁begin｜>function<｜tool▁sep｜>read\n```json\n{"a": "',
    "a call of Kimi K3 that is not offered": '<|open|>call tool="x"<|sep|>'
    '<|open|>argument key="a" type="string"<|sep|>',
    "an object, Kimi K3": '<|open|>call tool="read"<|sep|><|open|>json<|sep|>{"a": "',
    "Python's tag": '<|python_tag|>{"name":',
    "Harmony's header": "<|start|>assistant<|channel|>commentary to=functions.read",
    "Harmony's call": "<|channel|>commentary to=functions.read<|message|>{",
    "Harmony's start": "<|start|>",
    "reasoning": "<think>",
    "thoughts of Gemma": "<|channel>thought",
    "ends of blocks": "</tool_call>",
    "line breaks": "\n",
    "brackets": "{}",
    "escapes": "\\\\",
}
"""Texts of which an answer is made again and again."""
BEGINNINGS: Mapping[str, str] = {
    "nothing": "",
    "an object that is open": "<|tool_call>call:x{",
    "a value that is open": "<tool_call><function=x><parameter=a>",
    "a list that is open": "[TOOL_CALLS][{",
    "an answer in JSON": '{"name":',
    "reasoning that is open": "<think>",
}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Letters that readers have been given, one number for each time."""
    given_letters: list[int] = []
    feed = BlockReader.feed

    def counted(self: BlockReader, text: str) -> Any:
        given_letters.append(len(text))
        return feed(self, text)

    monkeypatch.setattr(BlockReader, "feed", counted)
    yield given_letters


@pytest.fixture
def small_budget(monkeypatch: pytest.MonkeyPatch) -> int:
    """So small that the budget's growth decides already in short texts."""
    monkeypatch.setattr(rereading, "BUDGET", 4)
    return 4


def case_of(family: str, text: str) -> Case:
    return Case(name="adversarial", text=text, family=FAMILIES[family])


def repeated(beginning: str, unit: str, letters: int) -> str:
    return (beginning + unit * (letters // len(unit) + 1))[:letters]


def work(read: list[int], family: str, text: str) -> tuple[int, int]:
    """Letters read and times that a reader was given some, for a reply and its end."""
    read.clear()
    split(case_of(family, text), [text])
    return sum(read), len(read)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "beginning", "end"),
    [
        *(("qwen3", beginning, "") for beginning in BEGINNINGS),
        ("qwen3", "a list that is open", "!"),
        ("qwen3", "an answer in JSON", "!"),
        ("glm4", "nothing", ""),
    ],
)
def test_a_text_four_times_as_long_costs_no_more_than_four_times_the_work(
    read, small_budget, family, beginning, end
):
    for name, unit in UNITS.items():
        short, long = (
            work(read, family, repeated(BEGINNINGS[beginning], unit, letters) + end)
            for letters in (LETTERS, 4 * LETTERS)
        )
        assert long[0] <= 4.2 * short[0] + small_budget * rereading.CELL, name
        assert long[1] <= 4.2 * short[1] + 3 * small_budget, name


@pytest.mark.thorough
@pytest.mark.checked(2)
@pytest.mark.parametrize("beginning", ["an object that is open", "a value that is open"])
def test_of_what_is_read_again_attempts_are_few(read, small_budget, beginning):
    for name, unit in UNITS.items():
        text = repeated(BEGINNINGS[beginning], unit, 4 * LETTERS)
        splitter = make_splitter(FAMILIES["qwen3"], TOOLS, reasoning_is_open=False, thinking=True)
        splitter.feed(text)
        read.clear()
        splitter.close(complete=True)
        assert len(read) <= 6 * (len(text) // rereading.CELL + small_budget), name


def test_of_an_assumed_reasoning_that_was_the_answer_attempts_are_few(read, small_budget):
    text = "I call: " + "<function=read>{" * 1_000
    splitter = make_splitter(FAMILIES["glm4"], TOOLS, reasoning_is_open=False, thinking=True)
    splitter.feed(text)
    splitter.close(complete=True)
    assert len(read) <= 6 * (len(text) // rereading.CELL + small_budget)


@pytest.mark.parametrize("unit", ["a list, Mistral", "an object, Gemma", "a function that is not offered"])
@pytest.mark.sample(3)
def test_the_time_to_close_grows_with_the_length_alone(unit):
    def seconds(letters: int) -> float:
        splitter = make_splitter(FAMILIES["qwen3"], TOOLS, reasoning_is_open=False, thinking=True)
        splitter.feed(repeated("", UNITS[unit], letters))
        began = time.thread_time()
        splitter.close(complete=True)
        return time.thread_time() - began

    short, long = (statistics.median(seconds(letters) for _ in range(3)) for letters in (40_000, 160_000))
    assert long < 8 * short + 0.01


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["qwen3", "glm4", "mistral"])
@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_of_what_is_no_call_nothing_is_lost(small_budget, family, beginning):
    for name, unit in UNITS.items():
        text = repeated(BEGINNINGS[beginning], unit, 4_000)
        if not text.startswith(("<think>", "\n")):
            outcome = outcome_of(split(case_of(family, text), [text]))
            assert not outcome.calls, name
            assert outcome.content == text, name


@pytest.mark.thorough
@given(
    st.data(),
    st.sampled_from(sorted(set(FAMILIES) - {"gpt_oss"})),
    st.lists(
        st.sampled_from([*UNITS.values(), "!", '"', "}", "x" * 300, WRITERS["mistral_list"].call("list")]),
        max_size=80,
    ),
    st.sampled_from(list(BEGINNINGS.values())),
)
def test_what_is_given_up_does_not_depend_on_how_the_text_was_cut(data, family, units, beginning):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rereading, "CELL", 256)
        patch.setattr(rereading, "BUDGET", data.draw(st.integers(0, 4)))
        case = case_of(family, beginning + "".join(units))
        whole = split(case, [case.text])
        assert split(case, data.draw(pieces_of(case.text))) == whole
        assert split(case, case.text) == whole


GOOD = WRITERS["gemma4"].call("read", path="b")
UNCLOSED = f'<|tool_call>call:read{{path:<|"|>{"a" * 3_000}<|"|>'


@pytest.mark.parametrize(("unclosed", "calls"), [(1, 1), (8, 1), (20, 0)])
def test_a_good_call_is_found_after_eight_long_ones_that_are_not_closed(unclosed, calls):
    text = UNCLOSED * unclosed + GOOD
    outcome = outcome_of(split(case_of("gemma4", text), [text]))
    assert len(outcome.closed_calls) == calls
    assert outcome.content == UNCLOSED * unclosed + GOOD * (1 - calls)


@pytest.mark.parametrize(("mentions", "calls"), [(100, 1), (150, 0)])
def test_a_good_call_is_found_after_a_hundred_openers_in_a_long_one_that_is_not_closed(mentions, calls):
    text = UNCLOSED + "<tool_call> opens. " * mentions + GOOD
    outcome = outcome_of(split(case_of("gemma4", text), [text]))
    assert len(outcome.closed_calls) == calls


@pytest.mark.thorough
def test_openers_that_are_read_for_the_first_time_cost_nothing():
    text = "<tool_call> opens. " * 2_000 + UNCLOSED + GOOD
    assert len(outcome_of(split(case_of("gemma4", text), [text])).closed_calls) == 1


def test_after_a_text_that_was_read_too_often_calls_are_calls_again():
    text = "[TOOL_CALLS][{" * 3_000 + "!" + "x" * rereading.CELL + GOOD
    outcome = outcome_of(split(case_of("gemma4", text), [text]))
    assert len(outcome.closed_calls) == 1
    assert outcome.content == text.removesuffix(GOOD)


def test_pieces_end_where_cells_do_however_the_text_came():
    text = rereading.RereadableText()
    pieces: list[str] = []
    for part in ("a" * 700, "b" * 700, "c" * 2_000):
        text.append(part)
        pieces += iter(text.next_piece, "")
    ends = [sum(map(len, pieces[: i + 1])) for i in range(len(pieces))]
    assert ends == [700, 1_024, 1_400, 2_048, 3_072, 3_400]
