"""Long prompts, full queues and clients that leave, through the proxy."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from start_llm.access.request_tenant import Tenants
from start_llm.engine.reply_writer import ReplyWriter
from tests.proxy.conftest import KEY, MODEL, SECRET, Proxied, until

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TEXT = "/v1/completions"
LONG = "word " * 20_000
SOME = 200
OFTEN_S = 0.1
HELD_BACK_S = 15
"""Less than LiteLLM would wait: until it has two hundred of them, or something to read."""


def bodies(text: str, **more: Any) -> dict[str, dict[str, Any]]:
    messages = [{"role": "user", "content": text}]
    # No name of a model that LiteLLM knows.
    return {
        CHAT: {"model": MODEL, "messages": messages, "max_tokens": 2, **more},
        RESPONSES: {"model": MODEL, "input": text, "max_output_tokens": 16, **more},
        MESSAGES: {"model": MODEL, "messages": messages, "max_tokens": 2, **more},
    }


every_protocol = pytest.mark.parametrize("path", bodies(""))


@pytest.fixture(autouse=True)
def often(proxied: Proxied) -> Generator[None]:
    """Signs of life ten times a second, and an engine that has dropped what the test before gave up."""
    until(lambda: prefill(proxied) is None, within_s=20)
    listener = proxied.server.app._listener
    usual = listener.limits
    listener.limits = replace(usual, keep_alive_s=OFTEN_S)
    yield
    listener.limits = usual


@contextmanager
def streaming(proxied: Proxied, path: str, body: Any) -> Generator[Iterator[dict[str, Any]]]:
    """The events of a reply. At the end the client hangs up."""
    connection = http.client.HTTPConnection("127.0.0.1", proxied.port, timeout=60)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    connection.request("POST", path, json.dumps({**body, "stream": True}), headers)
    reply = connection.getresponse()
    assert reply.status == 200
    lines = (line.decode() for line in reply)
    try:
        yield (json.loads(line[6:]) for line in lines if line.startswith("data: {"))
    finally:
        reply.close()
        connection.close()


def prefill(proxied: Proxied) -> dict[str, int] | None:
    return proxied.server.get("/stats")["engine"]["prefill"]


def is_sign_of_life(path: str, event: dict[str, Any]) -> bool:
    """As clients that go by data see it: an event of its protocol that says nothing new."""
    if path == CHAT:
        return event["choices"][0]["delta"] == {"annotations": []}
    return event["type"] == {RESPONSES: "response.in_progress", MESSAGES: "ping"}[path]


@pytest.mark.thorough
@every_protocol
def test_a_long_prompt_is_read_with_signs_of_life(proxied: Proxied, path: str):
    began = time.monotonic()
    with streaming(proxied, path, bodies(f"Signs of life. {LONG}")[path]) as events:
        opening = next(events)
        assert not is_sign_of_life(path, opening)
        for _ in range(4):
            assert is_sign_of_life(path, next(events))
        assert time.monotonic() - began < HELD_BACK_S
        assert requests(proxied)["in_flight"] == 1, "it was still being read"
    until(lambda: not requests(proxied)["in_flight"], within_s=10)


@every_protocol
@pytest.mark.thorough
def test_a_prompt_that_was_given_up_goes_on_where_it_was(proxied: Proxied, path: str):
    text = f"Given up on {path}. {LONG[:8_000]}"
    with streaming(proxied, path, bodies(text)[path]) as events:
        next(events)
        until(lambda: (prefill(proxied) or {"done": 0})["done"] > SOME, within_s=20)
        read = prefill(proxied) or {"done": SOME}
    until(lambda: not requests(proxied)["in_flight"], within_s=10)
    usage = proxied.ask(path, bodies(text)[path]).json["usage"]
    assert cached_tokens(usage) >= read["done"], (read, proxied.server.get("/stats"))


@pytest.mark.parametrize("path", [*bodies(""), TEXT])
@pytest.mark.thorough
def test_a_reply_that_nobody_reads_any_more_ends(proxied: Proxied, path: str):
    """Six times: it depends on what LiteLLM is doing at that moment."""
    for _ in range(6):
        hang_up_in_mid_reply(proxied, path)


def hang_up_in_mid_reply(proxied: Proxied, path: str) -> None:
    body = bodies("Hello").get(path, {"model": MODEL, "prompt": "Hello"})
    endless = {**body, "max_tokens": 4000, "max_output_tokens": 4000}
    with streaming(proxied, path, endless) as events:
        for _ in range(12):
            next(events)
        before = requests(proxied)
    until(lambda: not requests(proxied)["in_flight"], within_s=10)
    given_up = [counts["endings"].get("cancelled", 0) for counts in (before, requests(proxied))]
    assert given_up[1] == given_up[0] + 1, "it was made to its end"


def requests(proxied: Proxied) -> dict[str, Any]:
    return proxied.server.get("/stats")["requests"]


def cached_tokens(usage: dict[str, Any]) -> int:
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return details.get("cached_tokens") or usage["cache_read_input_tokens"]


@pytest.mark.thorough
def test_a_text_whose_client_has_gone_is_not_computed(proxied: Proxied):
    """Nobody has heard anything of the reply yet."""
    body = json.dumps({"model": MODEL, "prompt": "Gone. " + LONG, "max_tokens": 2})
    connection = http.client.HTTPConnection("127.0.0.1", proxied.port, timeout=60)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    connection.request("POST", TEXT, body, headers)
    until(lambda: prefill(proxied) is not None, within_s=20)
    connection.close()
    until(lambda: not requests(proxied)["in_flight"], within_s=10)
    assert requests(proxied)["endings"].get("cancelled", 0) >= 1


@pytest.mark.sample(6)
@pytest.mark.parametrize("stream", [False, True])
@every_protocol
def test_a_full_queue_says_when_to_come_again(proxied: Proxied, path: str, stream: bool):
    engine = proxied.server.app.runtime.engine
    assert engine is not None
    usual, engine._max_waiting = engine._max_waiting, 0
    try:
        answer = proxied.ask(path, bodies("Hello", stream=stream)[path])
    finally:
        engine._max_waiting = usual
    assert (answer.status, answer.headers.get_all("Retry-After")) == (503, ["2"])


@pytest.mark.thorough
def test_a_model_may_say_the_same_word_two_hundred_times(proxied: Proxied):
    word = 271
    asked = {"max_tokens": 200, "temperature": 0, "logit_bias": {str(word): 100}}
    with streaming(proxied, CHAT, {**bodies("Hello")[CHAT], **asked}) as events:
        chunks = list(events)
    assert "error" not in chunks[-1], chunks[-1]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert len("".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)) >= 600


@pytest.fixture
def knows_its_proxy(proxied: Proxied) -> Generator[None]:
    listener = proxied.server.app._listener
    usual = listener.context
    listener._context = replace(usual, tenants=Tenants(SECRET))
    yield
    listener._context = usual


@pytest.mark.thorough
@pytest.mark.checked(2)
@pytest.mark.usefixtures("knows_its_proxy")
@pytest.mark.parametrize("path", [*bodies(""), TEXT])
def test_a_failure_in_mid_stream_is_reported_with_its_reason(
    proxied: Proxied, path: str, monkeypatch: pytest.MonkeyPatch
):
    """Each time, however close after the reason the end of the stream comes."""
    body = bodies("Hi", max_tokens=40, max_output_tokens=40).get(path)
    feed = ReplyWriter.feed

    def broken(writer: ReplyWriter, *arguments: Any, **options: Any) -> list[Any]:
        if writer.produced >= 5:
            raise RuntimeError("out of order")
        return feed(writer, *arguments, **options)

    monkeypatch.setattr(ReplyWriter, "feed", broken)
    for _ in range(5):
        raw = everything(proxied, path, body or {"model": MODEL, "prompt": "Hi", "max_tokens": 40})
        assert "RuntimeError: out of order" in raw, raw[-500:]


def everything(proxied: Proxied, path: str, body: Any) -> str:
    """A whole stream, as it comes."""
    return proxied.ask(path, {**body, "stream": True}).text
