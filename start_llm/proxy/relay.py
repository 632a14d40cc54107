"""Give clients the server's replies as they are, beside LiteLLM, which chooses where a request goes.

LiteLLM parses each event of a stream, writes it anew and asks its hooks: up to a millisecond of Python an
event (lesson 330). It renames or drops headers and fields. So it sees of a stream no more than that it has
ended, and what it makes of the server's reply is dropped.
"""

import json
from collections.abc import AsyncIterator
from contextvars import ContextVar
from functools import wraps
from typing import Any, override

import httpx

from start_llm.core.answering_model import ANSWERING_MODEL
from start_llm.core.errors import InternalError, Overloaded
from start_llm.core.unenforced import UNENFORCED
from start_llm.protocols.responses.create import refused_stream
from start_llm.proxy.error_text import Application, Receive, Send, error_body

_RETRY_AFTER = "retry-after"
_PASSED_BACK = (
    "content-type",
    "content-length",
    "cache-control",
    "x-accel-buffering",
    "allow",
    _RETRY_AFTER,
    "request-id",
    "x-request-id",
    ANSWERING_MODEL,
    UNENFORCED,
)

_LITELLMS = frozenset(
    f"{prefix}{name}".encode() for name in (ANSWERING_MODEL, _RETRY_AFTER) for prefix in ("", "llm_provider-")
)
_MESSAGES, _RESPONSES = "/v1/messages", "/v1/responses"
_ENDS = {
    _RESPONSES: b'data: {"type":"response.completed","response":{"id":"resp_0","object":"response",'
    b'"created_at":0,"status":"completed","model":"any","output":[],"tools":[],"tool_choice":"auto",'
    b'"parallel_tool_calls":true}}\n\n'
}
"""What LiteLLM sees of a whole stream, by path: without this event it would look for a model that goes on."""
_EVENT_END = b"\n\n"
_CUT = (
    "Connection lost: the server ended in the middle of this reply. What came before is all that there is. "
    "You can retry your request."
)
"""With words by which clients know what to try again: pi ends its turn at an error that has none of them."""
_USUAL_WAIT = Overloaded("").headers["Retry-After"]


class Relay:
    """ASGI middleware around LiteLLM that sends the server's reply in place of LiteLLM's.

    `watch_replies` has to be called before. An error that LiteLLM tells gets the server's headers.
    """

    def __init__(self, litellm: Application) -> None:
        self._litellm = litellm

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        reply = RelayedReply(send)
        token = _REPLY.set(reply)
        try:
            await self._litellm(scope, receive, reply.replace)
        finally:
            _REPLY.reset(token)


class RelayedReply:
    """The reply to one request of the proxy."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._response: httpx.Response | None = None
        self._has_begun = self._is_relayed = self._is_complete = False
        self._is_between_events = False

    async def note(self, response: httpx.Response) -> None:
        """Take what the server has answered to LiteLLM. A stream begins at once."""
        if self._has_begun:
            return  # an answer to the proxy, which asks the server about an error that LiteLLM tells
        self._response = response
        if response.is_success and not response.is_closed:
            self._has_begun = self._is_relayed = True
            response.stream = _SentOn(response.stream, self, response.request.url.path)
            await self._send(reply_head(response))

    async def send_on(self, piece: bytes) -> None:
        self._is_between_events = piece.endswith(_EVENT_END)
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    def complete(self) -> None:
        """Note that the server has sent all of it."""
        self._is_complete = True

    async def cut(self, path: str) -> None:
        """End a stream that the server has not ended, with an error in the protocol of this path.

        In the midst of an event nothing can be said, and the client sees the cut.
        """
        if self._is_between_events:
            await self._send({"type": "http.response.body", "body": _cut_event(path)})

    async def replace(self, message: Any) -> None:
        """Send what belongs in the place of this message of LiteLLM."""
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif not self._is_relayed:
            await self._send(message)
        elif self._is_complete and not message.get("more_body"):
            await self._send({"type": "http.response.body"})

    async def _begin(self, start: Any) -> None:
        response = self._response
        if self._has_begun:
            return
        self._has_begun = True
        if response is None or not response.is_success or start["status"] >= httpx.codes.BAD_REQUEST:
            await self._send(self._with_headers(start))
            return
        self._is_relayed = self._is_complete = True
        await self._send(reply_head(response))
        await self.send_on(response.content)

    def _with_headers(self, start: Any) -> Any:
        """Return the start of LiteLLM's own reply with the headers that clients look at."""
        told = {} if self._response is None else self._response.headers
        headers = {ANSWERING_MODEL: told[ANSWERING_MODEL]} if ANSWERING_MODEL in told else {}
        if start["status"] == httpx.codes.SERVICE_UNAVAILABLE:
            headers[_RETRY_AFTER] = told.get(_RETRY_AFTER, _USUAL_WAIT)
        others = [pair for pair in start["headers"] if pair[0] not in _LITELLMS]
        own = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        return {**start, "headers": [*others, *own]}


class _SentOn(httpx.AsyncByteStream):
    """A stream of the server. Whoever reads it sends it to the client, and gets an end once it is whole."""

    def __init__(self, stream: Any, reply: RelayedReply, path: str) -> None:
        self._stream = stream
        self._reply = reply
        self._path = path

    @override
    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._stream:
                await self._reply.send_on(piece)
        except httpx.TransportError:
            await self._reply.cut(self._path)
            raise
        self._reply.complete()
        yield _ENDS.get(self._path, b"")

    @override
    async def aclose(self) -> None:
        await self._stream.aclose()


_REPLY: ContextVar[RelayedReply | None] = ContextVar("reply", default=None)
"""The reply to the request at hand. Tasks that it starts share it."""


def watch_replies() -> None:
    """Note each reply that this process gets for a request of the proxy."""
    plain = httpx.AsyncClient.send

    @wraps(plain)
    async def send(self: httpx.AsyncClient, *arguments: Any, **options: Any) -> httpx.Response:
        response = await plain(self, *arguments, **options)
        if reply := _REPLY.get():
            await reply.note(response)
        return response

    httpx.AsyncClient.send = send


def _cut_event(path: str) -> bytes:
    """Return the event that tells of a cut, in the form of this path's protocol."""
    if path == _RESPONSES:
        frame = refused_stream(InternalError(_CUT))
        return f"event: {frame.event}\ndata: {json.dumps(frame.data)}\n\n".encode()
    name = b"event: error\n" if path == _MESSAGES else b""
    return name + b"data: " + error_body(path, httpx.codes.BAD_GATEWAY, _CUT) + _EVENT_END


def reply_head(answer: httpx.Response) -> dict[str, Any]:
    """Return the start of a reply with the server's status, and the headers of it that clients get."""
    headers = [
        (name.encode(), answer.headers[name].encode("latin-1"))
        for name in _PASSED_BACK
        if name in answer.headers
    ]
    return {"type": "http.response.start", "status": answer.status_code, "headers": headers}
