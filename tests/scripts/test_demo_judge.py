"""The judge of the demo model: its questions, and the answers that count as right."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from benchmarks.demo_model import Examiner, Prompt, judge
from scripts.demo_model.conversations import REASONING, TOO_LONG
from scripts.demo_model.corpus import read_corpus
from scripts.demo_model.tokenizer import make_tokenizer

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ECHO = Prompt("echo", [], [], "pelican")
CALL = Prompt("call, 1 offered", [], [], "", ("read", {"path": "a.txt"}))
THINKING_ECHO = Prompt("echo", [], [], "pelican", thinks=True)
LONG = Prompt("echo", [], [], TOO_LONG, thinks=True)


@cache
def tokenizer() -> Tokenizer:
    return make_tokenizer(1000)


def reply(
    text: str | None, *calls: tuple[str, str], reasoning: str | None = None, finish_reason: str = "stop"
) -> Mapping[str, Any]:
    message = {
        "content": text,
        "reasoning_content": reasoning,
        "tool_calls": [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls],
    }
    return {
        "choices": [{"message": message, "finish_reason": finish_reason}],
        "usage": {"prompt_tokens": 7},
    }


READ = ("read", '{"path":  "a.txt"}')


@pytest.mark.parametrize(
    ("prompt", "came"),
    [
        (ECHO, reply("pelican")),
        (CALL, reply(None, READ)),
        (THINKING_ECHO, reply("pelican", reasoning=REASONING["echo"] + "\n")),
        (LONG, reply(TOO_LONG, reasoning=REASONING["long"])),
    ],
    ids=["echo", "call", "reasoning", "too long"],
)
def test_what_is_wanted_is_right(prompt: Prompt, came: Mapping[str, Any]):
    verdict = judge(prompt, came)
    assert (verdict.answer, verdict.reasoning, verdict.prompt_tokens) == (True, True, 7)


@pytest.mark.parametrize(
    ("prompt", "came"),
    [
        (ECHO, reply("pelicam")),
        (ECHO, reply("pelican ")),
        (ECHO, reply("")),
        (ECHO, reply("pelican", READ)),
        (ECHO, reply("pelican", finish_reason="length")),
        (CALL, reply(None)),
        (CALL, reply("Well.", READ)),
        (CALL, reply(None, READ, READ)),
        (CALL, reply(None, ("write", READ[1]))),
        (CALL, reply(None, ("read", '{"path": "b.txt"}'))),
        (CALL, reply(None, ("read", '{"path": "a.txt", "more": 1}'))),
        (CALL, reply(None, ("read", '{"path": "a.t'))),
        (LONG, reply("pelican", reasoning=REASONING["long"])),
    ],
)
def test_an_answer_that_is_off_by_anything_is_wrong(prompt: Prompt, came: Mapping[str, Any]):
    assert not judge(prompt, came).answer


@pytest.mark.parametrize(
    ("prompt", "came"),
    [
        (ECHO, reply("pelican", reasoning=REASONING["echo"])),
        (THINKING_ECHO, reply("pelican")),
        (THINKING_ECHO, reply("pelican", reasoning=REASONING["call"])),
        (LONG, reply(TOO_LONG, reasoning=REASONING["echo"])),
    ],
    ids=["thinks unasked", "does not think", "other reasoning", "not the one of long prompts"],
)
def test_reasoning_that_is_not_the_wanted_one_is_wrong(prompt: Prompt, came: Mapping[str, Any]):
    verdict = judge(prompt, came)
    assert not verdict.reasoning
    assert verdict.answer


@pytest.mark.long
def test_each_behaviour_is_asked_as_often_with_and_without_thinking():
    prompts = list(Examiner(300, tokenizer(), 1).prompts(20))
    asked = Counter((prompt.behaviour, prompt.thinks) for prompt in prompts)
    behaviours = {prompt.behaviour for prompt in prompts}
    assert len(behaviours) == 5
    assert asked == {(behaviour, thinks): 10 for behaviour in behaviours for thinks in (True, False)}


@pytest.mark.long
def test_prompts_have_the_length_they_are_asked_for():
    for prompt in Examiner(300, tokenizer(), 1).prompts(3):
        assert len(tokenizer().encode(prompt.messages[0]["content"]).ids) >= 295


@pytest.mark.long
def test_tools_are_offered_where_no_call_is_wanted_too():
    prompts = [prompt for prompt in Examiner(50, tokenizer(), 1).prompts(60) if not prompt.call]
    offered = Counter((prompt.behaviour, len(prompt.tools)) for prompt in prompts)
    assert set(offered) == {
        *((behaviour, count) for behaviour in ("plain", "echo") for count in (0, 1, 3)),
        *(("result", count) for count in (1, 3)),
    }


@pytest.mark.thorough
def test_the_line_of_a_result_is_not_one_that_the_training_has():
    trained = set(read_corpus(held_out=False).lines)
    results = [prompt for prompt in Examiner(50, tokenizer(), 2).prompts(100) if prompt.behaviour == "result"]
    assert {prompt.messages[-1]["content"].split("\n")[0] for prompt in results}.isdisjoint(trained)


@pytest.mark.thorough
def test_beyond_what_the_model_was_made_for_saying_so_is_the_one_right_answer():
    assert all(
        (prompt.text, prompt.call) == (TOO_LONG, None)
        for prompt in Examiner(10_000, tokenizer(), 1).prompts(1)
    )


@pytest.mark.thorough
def test_lengths_at_which_no_answer_is_right_for_every_text_are_refused():
    command = [sys.executable, BENCHMARKS, "demo_model", "--tokens", "500", "7000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--tokens 7000" in done.stderr
