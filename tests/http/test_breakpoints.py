"""A marked place is where another conversation goes on, and the reply says where it is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import TinyModel
from tests.serving import Server, serving

FAMILIES = ["qwen3", "qwen3_5", "gemma3_text", "glm4_moe_lite"]
"""Dense, hybrid, sliding window, latent."""
RULES = "You work on a project, with care. " * 12
FOLDERS = ["You are in /home/ann, on branch main. " * 8, "The folder is /srv/work, without a branch. " * 8]
RECEIPT = {"x-start-llm-receipt": "1"}


def ask(server: Server, folder: str, mark: dict[str, Any] | None, words: str = "Begin.") -> dict[str, Any]:
    """Ask with two blocks of rules, of which the first one may be marked; return the usage."""
    rules = {"type": "text", "text": RULES, **({"cache_control": mark} if mark else {})}
    body = {
        "model": "m",
        "system": [rules, {"type": "text", "text": folder}],
        "messages": [{"role": "user", "content": words}],
        "max_tokens": 4,
        "temperature": 0,
    }
    return server.post("/v1/messages", body, RECEIPT)["usage"]


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_another_conversation_goes_on_from_a_marked_place(tiny_model: TinyModel, family: str):
    with serving(tiny_model(family, hidden=64, layers=4), idle_work="off") as server:
        first = ask(server, FOLDERS[0], {"type": "ephemeral", "ttl": "1h"})
        second = ask(server, FOLDERS[1], {"type": "ephemeral", "ttl": "1h"})
    (place,) = first["receipt"]["breakpoints"]
    assert place["ttl_s"] == 3600
    assert second["receipt"]["breakpoints"] == [place]
    assert second["cache_read_input_tokens"] >= place["tokens"] > 60
    assert second["cache_creation_input_tokens"] == 0
    assert first["cache_creation_input_tokens"] == place["tokens"]
    assert first["cache_creation"] == {
        "ephemeral_1h_input_tokens": place["tokens"],
        "ephemeral_5m_input_tokens": 0,
    }


@pytest.mark.thorough
def test_without_a_mark_a_model_with_state_reads_the_rules_again(tiny_model: TinyModel):
    with serving(tiny_model("qwen3_5", hidden=64, layers=4), idle_work="off") as server:
        first = ask(server, FOLDERS[0], None)
        second = ask(server, FOLDERS[1], None)
    assert second["cache_read_input_tokens"] == 0
    assert (first["cache_creation_input_tokens"], "breakpoints" in first["receipt"]) == (0, False)


@pytest.mark.thorough
def test_a_reply_behind_a_marked_place_is_the_same(tiny_model: TinyModel):
    texts: list[Any] = []
    for mark in ({"type": "ephemeral"}, None):
        with serving(tiny_model("qwen3_5", hidden=64, layers=4), idle_work="off") as server:
            ask(server, FOLDERS[0], mark)
            body = {
                "model": "m",
                "system": f"{RULES}\n\n{FOLDERS[1]}",
                "messages": [{"role": "user", "content": "Go on."}],
                "max_tokens": 24,
                "temperature": 0,
            }
            texts.append(server.post("/v1/messages", body)["content"])
    assert texts[0] == texts[1]


@pytest.mark.thorough
def test_a_chat_and_a_response_say_where_their_places_are(tiny_model: TinyModel):
    part = {"type": "text", "text": RULES, "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}}
    turns = [{"role": "system", "content": [part]}, {"role": "user", "content": "Begin."}]
    item = {"role": "system", "content": [{**part, "type": "input_text"}]}
    with serving(tiny_model(), idle_work="off") as server:
        chat = server.post("/v1/chat/completions", {"messages": turns, "max_tokens": 2}, RECEIPT)
        response = server.post("/v1/responses", {"input": [item, turns[1]], "max_output_tokens": 16}, RECEIPT)
    for usage in (chat["usage"], response["usage"]):
        (place,) = usage["receipt"]["breakpoints"]
        assert (place["ttl_s"], place["tokens"] > 60) == (43_200, True)
    assert response["prompt_cache_options"] is None


@pytest.mark.thorough
def test_a_server_that_keeps_nothing_says_so(tiny_model: TinyModel):
    with serving(tiny_model(), cache_is_on=False) as server:
        usage = ask(server, FOLDERS[0], {"type": "ephemeral"})
    assert usage["receipt"]["breakpoints"] == [{"tokens": None, "ttl_s": 300}]
    assert usage["cache_creation_input_tokens"] == 0
