"""Bodies are read once in the proxy, as the server reads them, and go on as they were sent."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest
from backports import zstd

from start_llm.proxy.bodies import LONG_BYTES, Bodies, Body, body_of

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
MOST = 1_000_000


def read(
    raw: bytes,
    *,
    path: str = CHAT,
    method: str = "POST",
    coding: bytes = b"identity",
    is_whole: bool = True,
    body_s: float = 60,
) -> tuple[Body | None, Any]:
    """Return the body that goes on, or the error that was sent back."""
    bodies, sent = list[Body](), list[Any]()

    async def inside(scope: Any, _receive: Any, _send: Any) -> None:
        bodies.append(body_of(scope))

    async def send(event: Any) -> None:
        sent.append(event)

    coming = iter([(raw[:5], True), (raw[5:], not is_whole)])

    async def receive() -> Any:
        piece, more = next(coming, (None, True))
        if piece is None:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": piece, "more_body": more}

    headers = [(b"content-length", b"%d" % len(raw)), (b"content-encoding", coding)]
    scope = {"type": "http", "method": method, "path": path, "headers": headers}
    asyncio.run(Bodies(inside, MOST, body_s)(scope, receive, send))
    if not sent:
        return bodies[0], None
    return None, json.loads(sent[1]["body"]) | {"status": sent[0]["status"]}


def test_what_goes_on_is_what_was_sent():
    raw = b' {"model" : "m", "n": 1.50, "n": 1, "stop": "\\u00e9 \xc3\xa9"}  '
    body, _ = read(raw)
    assert body is not None
    assert (body.raw, body.model, body.fields.data["n"]) == (raw, "m", 1)


@pytest.mark.parametrize("name", [None, "", 5, ["m"]], ids=str)
def test_a_body_may_name_no_model(name: Any):
    body, _ = read(json.dumps({"model": name}).encode())
    assert body is not None
    assert body.model is None


@pytest.mark.parametrize(
    "raw", [b"[]", b"  [", b'"x"', b"1", b"null", b"", b"\xff", b"\n\n", b'{"a": NaN}', b"{" * 9]
)
def test_a_body_that_is_no_object_is_400(raw: bytes):
    _, error = read(raw, path=MESSAGES)
    assert (error["status"], error["type"]) == (400, "error")


@pytest.mark.parametrize(("coding", "compress"), [(b"gzip", gzip.compress), (b"zstd", zstd.compress)])
def test_a_compressed_body_goes_on_as_it_was_before(coding: bytes, compress: Callable[[bytes], bytes]):
    raw = b'{"model": "m", "n": 1}'
    body, _ = read(compress(raw), coding=coding)
    assert body is not None
    assert body.raw == raw


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
    _, error = read(raw, coding=coding)
    assert error["status"] == status


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_body_that_does_not_come_in_time_is_refused(path: str):
    _, error = read(b'{"model":', path=path, is_whole=False, body_s=0.01)
    assert (error["status"], error["error"]["message"]) == (
        408,
        "The body did not arrive within 0.01 seconds.",
    )


def test_a_long_body_is_read_alike():
    raw = json.dumps({"model": "m", "messages": "é" * LONG_BYTES}).encode()
    body, _ = read(raw)
    assert body is not None
    assert (body.raw, body.model) == (raw, "m")
    _, error = read(raw[:-1])
    assert error["status"] == 400


def test_a_get_has_no_body():
    body, error = read(b"{bad", path="/v1/models", method="GET")
    assert body is not None
    assert (body.raw, body.fields.data, error) == (b"", {}, None)
