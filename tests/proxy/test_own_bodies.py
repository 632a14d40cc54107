"""What the proxy makes of a body, without LiteLLM behind it."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest
from backports import zstd

from start_llm.core.chat import Json
from start_llm.proxy.own_bodies import OwnBodies

CONTROL = {"api_base", "num_retries", "tags", "timeout"}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
MOST = 1_000_000
DEFAULT = "the-loaded-one"


def passed(
    path: str, body: bytes, *, method: str = "POST", coding: bytes = b"identity"
) -> tuple[bytes, dict[bytes, bytes], Any, list[str]]:
    """Return the body and headers that go on, the error that was sent back, and what was told."""
    bodies, scopes, sent, told = list[bytes](), list[Any](), list[Any](), list[str]()

    async def inside(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)
        bodies.append((await receive())["body"])

    async def send(event: Any) -> None:
        sent.append(event)

    coming = iter(
        [
            {"type": "http.request", "body": body[:5], "more_body": True},
            {"type": "http.request", "body": body[5:]},
        ]
    )

    async def receive() -> Any:
        return next(coming)

    async def name() -> str:
        return DEFAULT

    application = OwnBodies(inside, control=CONTROL, max_body_bytes=MOST, default_name=name, tell=told.append)
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(b"content-length", b"%d" % len(body)), (b"content-encoding", coding)],
    }
    asyncio.run(application(scope, receive, send))
    if not bodies:
        return b"", {}, json.loads(sent[1]["body"]) | {"status": sent[0]["status"]}, told
    return bodies[0], dict(scopes[0]["headers"]), None, told


def kept(path: str, body: Any) -> Any:
    written, headers, error, _ = passed(path, json.dumps(body).encode())
    assert error is None
    assert headers[b"content-length"] == b"%d" % len(written)
    return json.loads(written)


@pytest.mark.parametrize(
    "body", [b"[]", b"  [", b'"x"', b"1", b"null", b"", b"\xff", b"\n\n", b'{"a": NaN}', b"{" * 9]
)
def test_a_body_that_is_no_object_is_400(body: bytes):
    _, _, error, _ = passed(MESSAGES, body)
    assert (error["status"], error["type"]) == (400, "error")


def test_what_goes_on_was_written_anew():
    raw = b' {"model" : "m", "n": 1.50, "n": 1, "stop": "\\u00e9 \xc3\xa9"}  '
    written, *_ = passed(CHAT, raw)
    assert written == '{"model":"m","n":1,"stop":"é é"}'.encode()


@pytest.mark.parametrize("path", [CHAT, "/chat/completions", f"{CHAT}/", MESSAGES, "/responses"])
@pytest.mark.parametrize("named", [{}, {"model": None}, {"model": ""}], ids=str)
def test_a_request_without_a_model_gets_the_name_of_the_one_that_answers(path: str, named: dict[str, Json]):
    assert kept(path, named) == {"model": DEFAULT}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/v1/messages/count_tokens"])
def test_what_goes_past_litellm_needs_none(path: str):
    assert kept(path, {}) == {}


def test_a_field_is_known_to_its_protocol_alone():
    assert kept(CHAT, {"model": "m", "system": "s", "input": "x", "messages": []}) == {
        "model": "m",
        "messages": [],
    }


@pytest.mark.parametrize(
    "field", ["api_base", "num_retries", "litellm_metadata", "LITELLM-x", "x-litellm-timeout"]
)
def test_a_field_that_steers_is_refused_by_name(field: str):
    _, _, error, _ = passed(RESPONSES, json.dumps({field: 0}).encode())
    assert (error["status"], error["error"]["param"]) == (400, field)


def test_null_is_no_field():
    assert kept(CHAT, {"model": "m", "timeout": None, "surprise": None}) == {"model": "m"}


def test_a_field_that_nobody_knows_is_told():
    *_, told = passed(CHAT, json.dumps({"model": "m", "surprise": 1, "extra_body": {"odd": 1}}).encode())
    assert ["'surprise'" in told[0], "'extra_body.odd'" in told[1], len(told)] == [True, True, 2]


def test_a_history_goes_on_mended_and_the_terminal_is_told():
    asked = {"role": "user", "content": "\ud83d"}
    messages = [asked, {"role": "assistant", "content": 5}, {"role": "user", "content": "Go on"}]
    written, _, error, told = passed(CHAT, json.dumps({"model": "m", "messages": messages}).encode())
    assert error is None
    assert [one["content"] for one in json.loads(written)["messages"]] == ["\ufffd", "5", "Go on"]
    assert ["messages[0]" in told[0], "messages[1]" in told[1], len(told)] == [True, True, 2]


@pytest.mark.parametrize(("coding", "compress"), [(b"gzip", gzip.compress), (b"zstd", zstd.compress)])
def test_a_compressed_body_goes_on_as_it_was_before(coding: bytes, compress: Callable[[bytes], bytes]):
    raw = compress(b'{"model": "m", "n": 1}')
    written, headers, *_ = passed(CHAT, raw, coding=coding)
    assert written == b'{"model":"m","n":1}'
    assert b"content-encoding" not in headers
    assert headers[b"content-length"] == b"%d" % len(written)


@pytest.mark.parametrize(
    ("raw", "coding", "status"),
    [
        (b"{}", b"br", 415),
        (b"{}", b"zstd", 400),
        (zstd.compress(b" " * (MOST + 1)), b"zstd", 413),
        (b"{}", b"gzip", 400),
        (gzip.compress(b" " * (MOST + 1)), b"gzip", 413),
        (b" " * (MOST + 1), b"identity", 413),
    ],
)
def test_a_body_that_cannot_be_decoded_or_is_too_long_is_refused(raw: bytes, coding: bytes, status: int):
    _, _, error, _ = passed(CHAT, raw, coding=coding)
    assert error["status"] == status


def test_extra_body_keeps_what_the_server_looks_at():
    inside = {"session_id": "s", "messages": [], "model": "x"}
    assert kept(CHAT, {"model": "m", "extra_body": inside}) == {
        "model": "m",
        "extra_body": {"session_id": "s"},
    }
    for odd in ("x", [], {}, None):
        assert kept(CHAT, {"model": "m", "extra_body": odd}) == {"model": "m"}
    _, _, error, _ = passed(CHAT, json.dumps({"extra_body": {"api_base": "x"}}).encode())
    assert (error["status"], error["error"]["param"]) == (400, "extra_body.api_base")


def test_metadata_keeps_what_the_server_looks_at():
    given = {"session_id": "s", "user_id": "u", "tags": ["a"], "mine": "x"}
    for path in (CHAT, MESSAGES):
        assert kept(path, {"model": "m", "metadata": given})["metadata"] == {
            "session_id": "s",
            "user_id": "u",
        }
        assert kept(path, {"model": "m", "metadata": json.dumps(given)}) == {"model": "m"}


def test_metadata_of_a_response_is_repeated_in_it():
    given = {"user_id": "u", "tags": "a", "mine": "x", "litellm_x": "y"}
    assert kept(RESPONSES, {"model": "m", "metadata": given})["metadata"] == {"user_id": "u", "mine": "x"}
    _, _, error, _ = passed(RESPONSES, b'{"metadata": "{}"}')
    assert error["error"]["message"] == "'metadata' must be an object, not a string."


def test_a_long_body_is_read_alike():
    long = {"model": "m", "messages": [{"role": "user", "content": "é" * 100_000}]}
    assert kept(CHAT, long) == long
    _, _, error, _ = passed(CHAT, json.dumps({"api_base": "x" * 200_000}).encode())
    assert error["error"]["param"] == "api_base"


def test_a_get_goes_through_as_it_is():
    written, headers, error, _ = passed("/v1/models", b"{bad", method="GET")
    assert (written, headers[b"content-length"], error) == (b"{bad"[:5], b"4", None)
