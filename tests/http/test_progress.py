"""How far a prompt is read, in llama.cpp's form, for clients that ask for it."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from tests.conftest import TinyModel
from tests.grammar import wire
from tests.server.client import ask
from tests.serving import Server, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = "fish sea boat " * 700
"""Read in several chunks."""


@pytest.fixture(scope="module")
def server(tiny_model: TinyModel) -> Generator[Server]:
    with serving(tiny_model("qwen3", hidden=64, layers=1), thinking=False) as instance:
        yield instance


def chunks(server: Server, path: str, text: str, **more: Any) -> list[dict[str, Any]]:
    asked = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    body = {**asked, "max_tokens": 3, "stream": True, "temperature": 0, **more}
    reply = ask(server.port, "POST", path, body)
    assert reply.status == 200, reply.body
    *events, done = wire.events_in(reply.body)
    assert done == wire.DONE
    return events


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_who_asks_gets_it_before_the_first_token(server: Server, path: str):
    text = f"{path} {LONG}"
    events = chunks(server, path, text, return_progress=True, return_receipt=True)
    progress = [item["prompt_progress"] for item in events if "prompt_progress" in item]
    receipt = events[-1]["usage"]["receipt"]
    assert [set(item) for item in progress] == [{"total", "cache", "processed", "time_ms"}] * len(progress)
    assert {(item["total"], item["cache"]) for item in progress} == {(receipt["prompt_tokens"], 0)}
    processed = [item["processed"] for item in progress]
    assert len(processed) > 1
    assert processed == sorted(processed)
    assert processed[-1] == receipt["prompt_tokens"] - 1, "the first token comes with the last one"
    assert all(item["time_ms"] >= 0 for item in progress)
    opening = ["prompt_progress" not in item for item in events].index(False)
    assert all("prompt_progress" in item for item in events[opening : opening + len(progress)])
    assert opening == (path == TEXT), "a text begins with an empty chunk"
    again = chunks(server, path, text, return_progress=True)
    (known,) = [item["prompt_progress"] for item in again if "prompt_progress" in item]
    assert known["cache"] == known["processed"] == receipt["prompt_tokens"] - 1


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_nobody_else_is(server: Server, path: str):
    for asks, is_sent in (({}, False), ({"return_progress": True}, True)):
        events = chunks(server, path, f"What is it? {is_sent}", **asks)
        assert any("prompt_progress" in event for event in events) == is_sent
    asked = {"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "max_tokens": 3}
    whole = ask(server.port, "POST", path, {**asked, "return_progress": True})
    assert (whole.status, b"prompt_progress" in whole.body) == (200, False)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_the_field_is_a_boolean(server: Server, path: str):
    asked = {"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "return_progress": "yes"}
    refused = ask(server.port, "POST", path, asked)
    assert (refused.status, refused.json["error"]["param"]) == (400, "return_progress")


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 3}),
    ],
)
def test_other_dialects_have_no_place_for_it(server: Server, path: str, asked: dict[str, Any]):
    reply = ask(server.port, "POST", path, {**asked, "stream": True, "return_progress": True})
    assert (reply.status, b"progress" in reply.body.replace(b"in_progress", b"")) == (200, False)
