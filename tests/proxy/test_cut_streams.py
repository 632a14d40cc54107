"""A stream that is cut ends with plain words, in every protocol; what a model writes stays as it is."""

import asyncio
import json
from typing import Any

import pytest

from start_llm.proxy.cut_streams import CutStreams

LIBRARYS = "litellm.APIConnectionError: Response payload is not completed: <TransferEncodingError: 400>"
ENDS = {
    "chat": {"error": {"message": LIBRARYS, "type": None, "param": None, "code": "500"}},
    "messages": {"type": "error", "error": {"type": "api_error", "message": LIBRARYS}},
    "responses": {"type": "response.failed", "response": {"id": "r", "error": {"message": LIBRARYS}}},
}


def through(*bodies: bytes) -> bytes:
    sent: list[bytes] = []

    async def litellm(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for body in bodies:
            await send({"type": "http.response.body", "body": body, "more_body": True})

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> Any:
        raise AssertionError("nothing is asked for")

    asyncio.run(CutStreams(litellm)({"type": "http"}, receive, send))
    return b"".join(sent)


def line(event: Any) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


@pytest.mark.parametrize("protocol", ENDS)
def test_the_error_is_told_in_plain_words(protocol: str):
    told = through(line({"choices": []}), b"event: error\n" + line(ENDS[protocol]) + b"data: [DONE]\n\n")
    assert b"TransferEncodingError" not in told
    assert b"the server ended in the middle of this reply" in told
    assert b"Connection lost" in told, "pi tries again"
    assert b"You can retry your request" in told, "pi tries again"
    event = json.loads(told.split(b"\n\n")[1].removeprefix(b"event: error\n").removeprefix(b"data: "))
    assert event.keys() == ENDS[protocol].keys()
    assert told.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    "event",
    [
        {"choices": [{"delta": {"content": LIBRARYS}}]},
        {"type": "content_block_delta", "delta": {"text": LIBRARYS}},
        {"error": {"message": "another one"}, "told": LIBRARYS},
        {"error": LIBRARYS},
        [LIBRARYS],
    ],
)
def test_what_is_no_such_error_stays_as_it_is(event: Any):
    assert through(line(event)) == line(event)


def test_what_cannot_be_read_stays_as_it_is():
    broken = b"data: {Response payload is not completed"
    assert through(broken) == broken
