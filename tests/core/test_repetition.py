"""A model that goes round in circles is noticed, and nothing else is."""

from __future__ import annotations

import base64
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from start_llm.core.chat import Message, ToolCall
from start_llm.core.repetition import (
    LONGEST_PERIOD,
    RUNAWAY_TOKENS,
    RunawayDetector,
    is_worth_reporting,
    repeated_calls,
)
from start_llm.models.loader import read

ROOT = Path(__file__).resolve().parents[2]


def first_notice(tokens: Sequence[int], piece: int = 7) -> tuple[int, int] | None:
    """How many tokens had come when a repetition was noticed, and the length of what is repeated."""
    detector = RunawayDetector()
    for end in range(piece, len(tokens) + piece, piece):
        period = detector.feed(tokens[end - piece : end])
        if period:
            return min(end, len(tokens)), period
    return None


@pytest.mark.parametrize("period", [1, 2, 7, 64, LONGEST_PERIOD])
@pytest.mark.parametrize("before", [0, 5, 1234])
def test_a_piece_that_repeats_is_noticed_soon_behind_two_thousand_tokens_of_it(period: int, before: int):
    piece = list(range(10, 10 + period))
    tokens = [*range(1000, 1000 + before), *itertools.islice(itertools.cycle(piece), 2 * RUNAWAY_TOKENS)]
    noticed = first_notice(tokens)
    assert noticed
    assert noticed[1] == period
    assert before + RUNAWAY_TOKENS <= noticed[0] <= before + RUNAWAY_TOKENS + 120


@pytest.mark.parametrize("length", [0, 1, RUNAWAY_TOKENS - 1])
def test_a_shorter_repetition_is_left_alone(length: int):
    assert first_notice([3, 4] * (length // 2)) is None


def test_a_longer_piece_is_no_loop():
    piece = list(range(LONGEST_PERIOD + 1))
    assert first_notice(piece * 30) is None


def test_a_repetition_that_goes_wrong_once_begins_anew():
    tokens = [1, 2, 3] * 600 + [9] + [1, 2, 3] * 600
    assert first_notice(tokens) is None


def sensible_texts() -> dict[str, str]:
    source, rng = ROOT / "start_llm", random.Random(1)
    code = "".join(path.read_text(encoding="utf-8") for path in sorted(source.glob("*.py")))
    rows = "\n".join(f"| {row} | 0 | 0 | {row % 2} | - | - |" for row in range(2000))
    zeros = "\n".join(", ".join("0" for _ in range(16)) + f",  // {row * 16}" for row in range(400))
    log = "\n".join(
        f"2026-11-26 10:00:{n % 60:02} INFO worker {n % 4} done, nothing to do" for n in range(1500)
    )
    return {
        "code": code,
        "docs": (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8"),
        "table": rows,
        "numbers": zeros,
        "base64": base64.b64encode(rng.randbytes(60_000)).decode(),
        "log": log,
        "json": "[" + ",\n".join(f'{{"id": {n}, "ok": true, "tags": []}}' for n in range(1500)) + "]",
        "lorem": " ".join(rng.choices(["lorem", "ipsum", "dolor", "sit"], k=9000)),
    }


@pytest.mark.parametrize("kind", sensible_texts())
@pytest.mark.sample(4)
def test_no_sensible_text_is_taken_for_a_loop(kind: str):
    tokenizer = read(ROOT / "models" / "demo").tokenizer
    tokens = tokenizer.encode(sensible_texts()[kind], as_document=False)
    assert len(tokens) > 2 * RUNAWAY_TOKENS
    assert first_notice(tokens) is None


# ------------------------------------------------------------------------------------------------ calls


def turn(name: str = "read", result: str = "no such file", say: str = "", **arguments: str) -> list[Message]:
    call = ToolCall(f"id{random.random()}", name, arguments)
    return [
        Message(role="assistant", content=say, tool_calls=(call,)),
        Message(role="tool", content=result, tool_call_id=call.id),
    ]


def talk(*turns: list[Message]) -> list[Message]:
    return [Message(role="user", content="Fix it"), *itertools.chain.from_iterable(turns)]


def test_the_same_call_with_the_same_result_is_counted_whatever_is_said_beside_it():
    turns = [turn(path="a.txt", say=f"I look, {number}") for number in range(5)]
    assert repeated_calls(talk(*turns)) == ("read", 5)


@pytest.mark.parametrize(
    "other", [turn(path="b.txt"), turn(path="a.txt", result="found"), turn("write", path="a.txt")]
)
def test_another_call_or_another_result_ends_the_count(other: list[Message]):
    same = turn(path="a.txt")
    assert repeated_calls(talk(same, same, other, same)) == ("read", 1)
    assert repeated_calls(talk(same, other, same, same)) == ("read", 2)


def test_a_question_ends_the_count_and_a_conversation_without_results_has_none():
    same = turn(path="a.txt")
    again = Message(role="user", content="Try again")
    assert repeated_calls([*talk(same, same), again]) == ("", 0)
    assert repeated_calls([*talk(same, same), again, *same]) == ("read", 1)
    assert repeated_calls(talk()) == ("", 0)
    assert repeated_calls([]) == ("", 0)
    assert repeated_calls([*talk(), same[0]]) == ("", 0)


def test_several_calls_at_once_are_one_turn():
    calls = (ToolCall("a", "read", {"path": "x"}), ToolCall("b", "list", {}))
    results = [
        Message(role="tool", content=text, tool_call_id=name) for name, text in (("a", "1"), ("b", "2"))
    ]
    both = [Message(role="assistant", tool_calls=calls), *results]
    assert repeated_calls(talk(both, both, both)) == ("read, list", 3)


def test_it_is_reported_at_four_and_whenever_it_has_doubled():
    assert [count for count in range(40) if is_worth_reporting(count)] == [4, 8, 16, 32]
