"""Streams: their grammar, the first event at once, signs of life, and how a failure looks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from start_llm.access.backend_secret import BackendSecret
from tests.grammar import completions, wire
from tests.server.breakable import BreakableServer, breakable
from tests.server.client import (
    CHAT,
    TEXT,
    Client,
    CutOff,
    ask,
    engine_is_free,
    stats,
    wait_until,
    without_cached,
)
from tests.server.conftest import LONG_PROMPT
from tests.serving import Server, serving

REQUESTS = {CHAT: {"messages": [{"role": "user", "content": "Hi"}]}, TEXT: {"prompt": "Hi\n"}}
SCRIPT = "Hello you there."
LONG_CHAT = {"messages": [{"role": "user", "content": "\x01" * 60_000}]}
LONG_REQUESTS = {CHAT: LONG_CHAT, TEXT: {"prompt": LONG_PROMPT}}
both = pytest.mark.parametrize("path", [CHAT, TEXT])


def streamed(server: Server, path: str, **fields: Any) -> list[Any]:
    """All events of a whole stream, after which the connection must be usable."""
    with Client(server.port) as client:
        client.request("POST", path, REQUESTS[path] | {"stream": True, "temperature": 0} | fields)
        status, headers = client.head()
        assert status == 200
        assert headers["content-type"] == "text/event-stream; charset=utf-8"
        assert headers["cache-control"] == "no-cache"
        events = list(client.events())
        assert client.ask("GET", "/health").status == 200
        return events


def text_of(event: Any) -> str:
    """The text in the only choice of an event."""
    (choice,) = event["choices"]
    return choice["text"] if "text" in choice else choice["delta"].get("content", "")


def finish_reason(event: Any) -> str | None:
    return event["choices"][0]["finish_reason"]


# ------------------------------------------------------------------------------------------------- grammar


@both
def test_a_stream_says_what_the_whole_reply_says(scripted: Server, path: str):
    *events, done = streamed(scripted, path)
    assert done == "[DONE]"
    assert "".join(text_of(event) for event in events) == SCRIPT
    whole = ask(scripted.port, "POST", path, REQUESTS[path] | {"temperature": 0}).json
    (choice,) = whole["choices"]
    assert (choice["text"] if path == TEXT else choice["message"]["content"]) == SCRIPT
    assert without_cached(events[-1]["usage"]) == without_cached(whole["usage"])


@both
def test_a_reply_is_known_by_one_id_and_so_is_a_refusal(scripted: Server, path: str):
    whole = ask(scripted.port, "POST", path, REQUESTS[path])
    stream = ask(scripted.port, "POST", path, REQUESTS[path] | {"stream": True})
    assert whole.headers["x-request-id"] == whole.json["id"]
    assert stream.headers["x-request-id"] == completions.read(list(wire.events_in(stream.body))).body["id"]
    refused = [ask(scripted.port, "POST", path, {}).headers["x-request-id"] for _ in range(2)]
    assert refused[0].startswith("req_")
    assert refused[0] != refused[1]


@both
def test_every_event_carries_the_same_head(scripted: Server, path: str):
    *events, _ = streamed(scripted, path, model="my-model", stream_options={"include_usage": True})
    heads = {(event["id"], event["object"], event["created"], event["model"]) for event in events}
    ((name, kind, _, model),) = heads
    assert model == "my-model"
    assert (name.partition("-")[0], kind) == (
        ("chatcmpl", "chat.completion.chunk") if path == CHAT else ("cmpl", "text_completion")
    )


def test_a_chat_stream_is_role_then_content_then_finish(scripted: Server):
    first, *middle, last, done = streamed(scripted, CHAT)
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    ]
    assert all(list(event["choices"][0]["delta"]) == ["content"] for event in middle)
    assert all(text_of(event) and finish_reason(event) is None for event in middle)
    assert last["choices"] == [{"index": 0, "delta": {}, "finish_reason": "stop"}]
    assert done == "[DONE]"


def test_a_text_stream_is_text_then_finish(scripted: Server):
    *texts, last, done = streamed(scripted, TEXT)
    assert all(finish_reason(event) is None for event in texts)
    assert (text_of(last), finish_reason(last), done) == ("", "stop", "[DONE]")


@pytest.mark.sample(2)
@both
def test_usage_stands_in_the_finish_event_unless_the_client_asked_for_its_own(scripted: Server, path: str):
    *events, _ = streamed(scripted, path)
    assert [index for index, event in enumerate(events) if "usage" in event] == [len(events) - 1]
    *others, finish, usage, done = streamed(scripted, path, stream_options={"include_usage": True})
    assert (finish_reason(finish), usage["choices"], done) == ("stop", [], "[DONE]")
    assert not any("usage" in event for event in [*others, finish])
    counts = usage["usage"]
    assert counts["total_tokens"] == counts["prompt_tokens"] + counts["completion_tokens"]
    cached = {"cached_tokens": counts["prompt_tokens"] - 1, "cache_write_tokens": 1}
    assert (counts["completion_tokens"], counts["prompt_tokens_details"]) == (5, cached)


@both
def test_a_limit_ends_the_stream_with_length(scripted: Server, path: str):
    *events, last, _ = streamed(scripted, path, max_tokens=2)
    assert finish_reason(last) == "length"
    assert "".join(text_of(event) for event in events) == "Hello you"


@both
def test_a_stop_string_is_never_streamed(scripted: Server, path: str):
    *events, last, _ = streamed(scripted, path, stop=[" there"])
    assert finish_reason(last) == "stop"
    assert "".join(text_of(event) for event in events) == "Hello you"


@both
def test_logprobs_and_token_ids_stream_with_their_text(scripted: Server, path: str):
    wanted = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    *events, _ = streamed(scripted, path, return_token_ids=True, **wanted)
    choices = [event["choices"][0] for event in events]
    assert sum(len(choice.get("token_ids", [])) for choice in choices) == 5
    scores = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    tokens = (
        [entry["token"] for score in scores for entry in score["content"]]
        if path == CHAT
        else [token for score in scores for token in score["tokens"]]
    )
    assert "".join(tokens) == SCRIPT


# ------------------------------------------------------------------------------------------- signs of life


@pytest.fixture(scope="module")
def lively(endless_model: Path) -> Iterator[Server]:
    with serving(endless_model, keep_alive_s=0.1) as server:
        yield server


def prefill(server: Server) -> dict[str, int] | None:
    return stats(server.port)["engine"]["prefill"]


@pytest.mark.thorough
@both
def test_the_first_event_comes_before_a_long_prompt_is_read(endless: Server, path: str):
    with Client(endless.port) as client:
        client.request("POST", path, LONG_REQUESTS[path] | {"stream": True})
        assert client.head()[0] == 200
        first = next(client.events())
        assert text_of(first) == ""
        wait_until(lambda: prefill(endless) is not None, within_s=5)
        progress = prefill(endless)
        assert progress is not None
        assert progress["done"] < progress["total"]
    wait_until(lambda: engine_is_free(endless.port), within_s=10)


@both
@pytest.mark.thorough
def test_empty_data_events_show_life_while_a_long_prompt_is_read(lively: Server, path: str):
    with Client(lively.port) as client:
        client.request("POST", path, LONG_REQUESTS[path] | {"stream": True})
        client.head()
        events = client.events()
        opening = next(events)
        for _ in range(3):
            event = next(events)
            assert (text_of(event), finish_reason(event)) == ("", None)
            assert path == TEXT or event["choices"][0]["delta"] == {"annotations": []}
            assert event["id"] == opening["id"]
        wait_until(lambda: prefill(lively) is not None, within_s=5)
    wait_until(lambda: engine_is_free(lively.port), within_s=10)


def test_a_stream_that_flows_holds_no_empty_events(scripted_model: Path):
    with serving(scripted_model, keep_alive_s=10.0) as server:
        _, *middle, _, _ = streamed(server, CHAT)
        assert all(text_of(event) for event in middle)


# ------------------------------------------------------------------------------------------------ failures


@pytest.fixture(scope="module")
def broken_at_will(endless_model: Path) -> Iterator[BreakableServer]:
    with breakable(endless_model) as server:
        yield server


@pytest.fixture
def server(broken_at_will: BreakableServer) -> Iterator[BreakableServer]:
    """Whole before each test, and serving after it."""
    broken_at_will.network.is_broken = False
    yield broken_at_will
    broken_at_will.network.is_broken = False
    assert ask(broken_at_will.port, "POST", CHAT, REQUESTS[CHAT] | {"max_tokens": 3}).status == 200
    wait_until(lambda: engine_is_free(broken_at_will.port), within_s=10)


def rest_of(events: Iterator[Any]) -> list[Any]:
    """The events up to where the stream is cut; fails if it ends well."""
    read: list[Any] = []
    with pytest.raises(CutOff):
        for event in events:
            read.append(event)  # noqa: PERF402 - what was read before the cut must be kept
    return read


@pytest.mark.sample(2)
@both
def test_a_failure_in_mid_stream_is_an_error_event_and_a_cut_stream(server: BreakableServer, path: str):
    with Client(server.port) as client:
        client.request("POST", path, REQUESTS[path] | {"stream": True})
        client.head()
        events = client.events()
        assert all(next(events)["choices"] for _ in range(3))
        server.network.is_broken = True
        *texts, failure = rest_of(events)
        assert all(finish_reason(event) is None for event in texts)
        assert failure["error"]["type"] == "server_error"
        assert "RuntimeError: out of order" in failure["error"]["message"]
        assert client.is_closed()


def test_to_the_proxy_the_stream_of_a_failure_is_whole(endless_model: Path):
    """It would drop the reason, if the cut came right after it."""
    secret = BackendSecret("s")
    with breakable(endless_model, secret=secret) as server, Client(server.port) as client:
        body = REQUESTS[CHAT] | {"stream": True}
        client.request("POST", CHAT, body, {"Authorization": f"Bearer {secret.api_key}"})
        client.head()
        events = client.events()
        next(events)
        server.network.is_broken = True
        *_, failure = events
        assert "RuntimeError: out of order" in failure["error"]["message"]
        assert client.is_closed()


@pytest.mark.thorough
@both
def test_a_failure_while_the_prompt_is_read_is_an_error_event_too(server: BreakableServer, path: str):
    with Client(server.port) as client:
        client.request("POST", path, LONG_REQUESTS[path] | {"stream": True})
        client.head()
        events = client.events()
        opening = next(events)
        wait_until(lambda: stats(server.port)["engine"]["prefill"] is not None, within_s=5)
        server.network.is_broken = True
        failure = rest_of(events)[-1]
        assert text_of(opening) == ""
        assert failure["error"]["type"] == "server_error"


@both
def test_a_failure_before_a_whole_reply_is_500_and_the_next_request_works(server: BreakableServer, path: str):
    counts = stats(server.port)
    server.network.is_broken = True
    with Client(server.port) as client:
        reply = client.ask("POST", path, REQUESTS[path])
        assert (reply.status, reply.error["type"]) == (500, "server_error")
        assert "out of order" in reply.error["message"]
        server.network.is_broken = False
        assert client.ask("POST", path, REQUESTS[path] | {"max_tokens": 1}).status == 200
    later = stats(server.port)
    assert later["engine"]["failures"] == counts["engine"]["failures"] + 1
    assert later["requests"]["endings"]["failed"] == counts["requests"]["endings"].get("failed", 0) + 1


def test_a_failure_ends_every_reply_that_shared_the_step(server: BreakableServer):
    with Client(server.port) as first, Client(server.port) as other:
        for client in (first, other):
            client.request("POST", CHAT, REQUESTS[CHAT] | {"stream": True})
            client.head()
        wait_until(lambda: stats(server.port)["batch"]["active_rows"] == 2, within_s=5)
        server.network.is_broken = True
        for client in (first, other):
            assert rest_of(client.events())[-1]["error"]["type"] == "server_error"
