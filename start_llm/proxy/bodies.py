"""Read each body once: within its limit, decompressed, and parsed as the server parses it."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import anyio
from starlette.requests import ClientDisconnect, Request

from start_llm.access.content_coding import IDENTITY, content_coding, decoded
from start_llm.core.errors import RequestError, body_too_large, body_too_slow
from start_llm.protocols.fields import Fields, parse_body
from start_llm.proxy.asgi import Application, Receive, Send
from start_llm.proxy.refusals import refuse

_KEY = "start_llm.body"
LONG_BYTES = 100_000
"""What is longer is parsed on a thread, while other requests are served."""


@dataclass(frozen=True, slots=True)
class Body:
    """The body of a request; empty for another method than POST.

    Attributes:
        raw: decompressed.
        fields: its JSON object.
    """

    raw: bytes = b""
    fields: Fields = field(default_factory=lambda: Fields({}))

    @property
    def model(self) -> str | None:
        """The name of a model that the request asks for, if it names one."""
        name = self.fields.data.get("model")
        return name if isinstance(name, str) and name else None


def body_of(scope: Any) -> Body:
    """Return the body that `Bodies` has read of a request."""
    return scope.get(_KEY) or Body()


class Bodies:
    """ASGI middleware that reads the body of each POST, which `body_of` then returns.

    Args:
        max_body_bytes: the longest body, also once it is decompressed.
        body_s: seconds within which all of it has to come.
    """

    def __init__(self, inside: Application, max_body_bytes: int, body_s: float) -> None:
        self._inside = inside
        self._max_body_bytes = max_body_bytes
        self._body_s = body_s

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            try:
                scope = scope | {_KEY: await self._read(Request(scope, receive))}
            except ClientDisconnect:
                return
            except RequestError as error:
                await refuse(scope, send, error)
                return
        await self._inside(scope, receive, send)

    async def _read(self, request: Request) -> Body:
        raw = await self._received(request)
        is_long = len(raw) > LONG_BYTES
        return Body(raw, await asyncio.to_thread(parse_body, raw) if is_long else parse_body(raw))

    async def _received(self, request: Request) -> bytes:
        """Return the body, decompressed.

        Raises:
            BodyTooLarge: it is longer than the limit.
            RequestTimeout: it takes longer than the limit.
        """
        coding = content_coding(", ".join(request.headers.getlist("content-encoding")))
        try:
            with anyio.fail_after(self._body_s):
                raw = await self._sent(request)
        except TimeoutError as error:
            raise body_too_slow(self._body_s) from error
        if coding == IDENTITY:
            return raw
        return await asyncio.to_thread(decoded, raw, coding, self._max_body_bytes)

    async def _sent(self, request: Request) -> bytes:
        raw = bytearray()
        async for piece in request.stream():
            raw += piece
            if len(raw) > self._max_body_bytes:
                raise body_too_large(self._max_body_bytes)
        return bytes(raw)
