"""The example of docs/assert-reuse.md: a test for CI that an agent's turns read no more than they add."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from typing import Any

import pytest

from tests.conftest import TinyModel
from tests.serving import Server, serving

type Rules = Callable[[], str]

NEW = 60
"""Tokens that a question of these, a reply and the marks around them come to at most."""


def assert_reads_at_most(usage: dict[str, Any], tokens: int) -> None:
    """Fail if a turn has read more prompt tokens than it adds."""
    receipt = usage["receipt"]
    computed = receipt["read"] + receipt["told"]
    assert computed <= tokens, f"{computed} tokens were read, {tokens} are new: {receipt}"


@pytest.fixture(scope="module")
def server(tiny_model: TinyModel) -> Generator[Server]:
    with serving(tiny_model("qwen3", hidden=128, layers=2), thinking=False) as running:
        yield running


def three_turns(server: Server, rules: Rules) -> list[dict[str, Any]]:
    """Return the usage of each turn of an agent that sends its whole conversation each time."""
    messages: list[dict[str, Any]] = []
    usages: list[dict[str, Any]] = []
    for question in ("How deep is the sea?", "And at low tide?", "And behind the breakwater?"):
        messages.append({"role": "user", "content": question})
        asked = [{"role": "system", "content": rules()}, *messages]
        body = {"messages": asked, "max_tokens": 8, "temperature": 0}
        reply = server.post("/v1/chat/completions", body, {"x-start-llm-receipt": "1"})
        messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
        usages.append(reply["usage"])
    return usages


def test_an_agent_that_keeps_its_beginning_reads_what_is_new(server: Server):
    first, *others = three_turns(server, lambda: "You help at the harbour. " * 30)
    assert first["receipt"]["read"] > NEW
    for usage in others:
        assert_reads_at_most(usage, NEW)


def test_an_agent_that_changes_its_beginning_is_caught(server: Server):
    def rules() -> str:
        return f"Request {random.randrange(10**9)}. " + "You help at the harbour. " * 30

    _, second, _ = three_turns(server, rules)
    with pytest.raises(AssertionError, match="tokens were read, 60 are new"):
        assert_reads_at_most(second, NEW)
