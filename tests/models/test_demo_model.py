"""The committed demo model: its files are the script's, and it does what it was trained for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from benchmarks import demo_model as judge
from scripts.demo_model.conversations import RETURNED, TOO_LONG
from scripts.demo_model.words import Words
from start_llm.config.paths import DEMO_MODEL
from tests.serving import Server, serving

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "demo_model"
MEGABYTE = 1_000_000
FEW_TOKENS = 250
FEW, MANY = 2, 12
"""Prompts of each behaviour, in CI and with all tests."""
MAX_WRONG = {"plain": 1, "echo": 1, "call, 1 offered": 1, "call, 3 offered": 2, "result": 1}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(DEMO_MODEL) as server:
        yield server


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


# ------------------------------------------------------------------------------------------------- its files


@pytest.mark.parametrize(("name", "source"), [("chat_template.jinja",) * 2, ("README.md", "model_card.md")])
def test_template_and_card_are_those_of_the_script(name: str, source: str):
    assert (DEMO_MODEL / name).read_bytes() == (SCRIPT / source).read_bytes()


def test_the_folder_has_what_the_script_writes_and_no_more():
    written = {
        "chat_template.jinja",
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    assert {path.name for path in DEMO_MODEL.iterdir()} == written | {
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_the_folder_takes_eight_megabytes_at_most():
    assert sum(path.stat().st_size for path in DEMO_MODEL.iterdir()) <= 8 * MEGABYTE


# ---------------------------------------------------------------------------------------------- what it does


@pytest.mark.thorough
def test_the_start_says_that_it_is_the_demo_model(server: Server):
    assert "This is the demo model: it says what it is" in server.printed()


@pytest.fixture(scope="module", params=[FEW, pytest.param(MANY, marks=pytest.mark.long)])
def count(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def verdicts(server: Server, count: int) -> dict[str, list[judge.Verdict]]:
    prompts = judge.Examiner(FEW_TOKENS, tokenizer(), 3).prompts(count)
    results: dict[str, list[judge.Verdict]] = {name: [] for name in MAX_WRONG}
    for prompt in prompts:
        results[prompt.behaviour].append(judge.ask(server.port, prompt))
    return results


@pytest.mark.parametrize("behaviour", MAX_WRONG)
@pytest.mark.thorough
def test_it_does_what_it_was_trained_for(
    verdicts: dict[str, list[judge.Verdict]], behaviour: str, count: int
):
    wrong = [verdict.output for verdict in verdicts[behaviour] if not verdict.answer]
    assert len(verdicts[behaviour]) == count
    assert len(wrong) <= min(MAX_WRONG[behaviour], count // 2), wrong


@pytest.mark.thorough
@pytest.mark.parametrize("thinks", [True, False])
def test_it_thinks_when_it_should_and_else_not(
    verdicts: dict[str, list[judge.Verdict]], thinks: bool, count: int
):
    asked = [verdict for group in verdicts.values() for verdict in group if verdict.prompt.thinks == thinks]
    assert len(asked) == len(MAX_WRONG) * count / 2
    assert sum(not verdict.reasoning for verdict in asked) <= 1


@pytest.mark.long
def test_of_a_prompt_that_is_too_long_it_says_so(server: Server):
    text = Words(random.Random(2), held_out=True).filler(17_000)
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "Say the word pelican."}]
    reply = server.post(
        "/v1/chat/completions", {"messages": messages, "temperature": 0, "enable_thinking": False}
    )
    assert reply["choices"][0]["message"]["content"] == TOO_LONG


@pytest.mark.thorough
def test_a_conversation_with_a_tool_is_not_read_twice(server: Server):
    """Question, call, result, answer, another question: each prompt goes on where the one before ended."""
    prompts = judge.Examiner(FEW_TOKENS, tokenizer(), 4).prompts(1)
    prompt = next(prompt for prompt in prompts if prompt.behaviour == "call, 1 offered")
    messages, read = list(prompt.messages), []

    def answer() -> dict[str, Any]:
        body = {"messages": messages, "tools": prompt.tools, "temperature": 0}
        reply = server.post("/v1/chat/completions", body)
        message, usage = reply["choices"][0]["message"], reply["usage"]
        read.append(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])
        messages.append(message)
        return message

    call = answer()["tool_calls"][0]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "wind from the west\nand more"}
    messages.append(result)
    assert answer()["content"] == f"{RETURNED}wind from the west"
    messages.append({"role": "user", "content": "Say the word pelican."})
    assert answer()["content"] == "pelican"
    assert max(read[1:]) < 40 < FEW_TOKENS < read[0]
