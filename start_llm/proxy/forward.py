"""Send each request to a server, and its reply to the client, byte for byte and as it comes.

A body that came compressed is sent decompressed: the proxy has read it.

LiteLLM's router says which server answers for the model that a request names, and sees nothing else of it.
LiteLLM would parse the body, write it anew for a provider, rename or drop fields and headers, and quote
errors in words of its own; a request took it 12 ms of Python, and an event up to one (lessons 330 and 367).
"""

from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

import aiohttp
import anyio

from start_llm.access.key_limits import LIMIT_HEADERS
from start_llm.core.answering_model import ANSWERING_MODEL
from start_llm.core.errors import InternalError, Overloaded
from start_llm.core.unenforced import UNENFORCED
from start_llm.protocols.base import new_id
from start_llm.protocols.dialects import dialect
from start_llm.protocols.routes import Route, RouteMatch
from start_llm.proxy.asgi import Application, Receive, Send
from start_llm.proxy.backend import UNREACHABLE, Backend
from start_llm.proxy.bodies import Body, body_of
from start_llm.proxy.open_routes import OPEN_ROUTES, is_litellms
from start_llm.proxy.refusals import encoded, refuse

_PASSED_BACK = (
    "content-type",
    "content-length",
    "cache-control",
    "x-accel-buffering",
    "allow",
    "retry-after",
    "request-id",
    "x-request-id",
    ANSWERING_MODEL,
    UNENFORCED,
    *LIMIT_HEADERS,
)
_EVENTS, _EVENT_DATA, _EVENT_END = "text/event-stream", b"data:", b"\n\n"
_CUT = (
    "Connection lost: the server ended in the middle of this reply. What came before is all that there is. "
    "You can retry your request."
)
"""With words by which clients know what to try again: pi ends its turn at an error that has none of them."""

type FindServer = Callable[[Body], Awaitable[Backend]]


class Forward:
    """ASGI application that sends requests to a server; LiteLLM answers what is its own.

    Args:
        find_server: returns the server that a request goes to, by its body.
    """

    def __init__(self, litellm: Application, find_server: FindServer) -> None:
        self._litellm = litellm
        self._find_server = find_server

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        match = OPEN_ROUTES.find(scope["method"], scope["path"]) if scope["type"] == "http" else None
        if match is None or is_litellms(match.route):
            await self._litellm(scope, receive, send)
            return
        async with anyio.create_task_group() as group:
            group.start_soon(_leave_with_client, receive, group.cancel_scope)
            await self._answer(scope, match, send)
            group.cancel_scope.cancel()

    async def _answer(self, scope: Any, match: RouteMatch, send: Send) -> None:
        path = match.path(quote(match.name))
        body, query = body_of(scope), scope["query_string"].decode("latin-1")
        server = await self._find_server(body)
        try:
            target = f"{path}?{query}" if query else path
            answer = await server.ask(scope["method"], target, scope["headers"], body.raw)
        except UNREACHABLE as error:
            problem = f"The server behind this proxy does not answer: {type(error).__name__}."
            await refuse(scope, send, Overloaded(problem))
            return
        async with answer:
            await send(_head(answer))
            if await _send_on(answer, match.route, send):
                await send({"type": "http.response.body"})


async def _leave_with_client(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def _head(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    """Return the start of a reply with the server's status, and the headers of it that clients get."""
    headers = encoded((name, answer.headers[name]) for name in _PASSED_BACK if name in answer.headers)
    return {"type": "http.response.start", "status": answer.status, "headers": headers}


async def _send_on(answer: aiohttp.ClientResponse, route: Route, send: Send) -> bool:
    """Send the body as it comes. A stream that the server does not end, ends with an error.

    Returns:
        False if it was cut in the midst of an event or an object: the client has to see that.
    """
    end, has_begun = _EVENT_END, False
    try:
        async for piece in answer.content.iter_any():
            end = (end + piece)[-len(_EVENT_END) :]
            has_begun = has_begun or _EVENT_DATA in piece
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    except aiohttp.ClientError:
        if answer.content_type != _EVENTS or end != _EVENT_END:
            return False
        events = _cut_events(route, has_begun=has_begun)
        await send({"type": "http.response.body", "body": events, "more_body": True})
    return True


def _cut_events(route: Route, *, has_begun: bool) -> bytes:
    """Return the event that tells of a cut, in the form of the endpoint's protocol; if nothing but comments
    came before, also what its clients expect in front of it.
    """
    events = dialect(route.path).stream_refusal(InternalError(_CUT), new_id("req_"))
    return b"".join(event.encoded() for event in (events[-1:] if has_begun else events))
