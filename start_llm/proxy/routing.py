"""Send each request to one of several servers: to that which has computed its conversation before.

1. Of a response that a client goes on from or asks for: the server that keeps it.
2. The server that the conversation went to last: by the client's id for it, else by its longest known prefix.
3. Of a conversation that is not known and has replies: the server whose cache has most of it, if that is at
   least half of its prompt. Each is asked to explain it, which computes nothing.
4. Of a new conversation, and of what nobody has: the server with the least to do.

A server that is stopping, has died or is stuck gets nothing. If it fails before it has sent anything, the
request goes to another one.
"""

import asyncio
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from start_llm.core.chat import Json
from start_llm.core.errors import Overloaded
from start_llm.protocols.routes import RouteMatch
from start_llm.proxy.asgi import Application, Receive, Send
from start_llm.proxy.backend import WholeAnswer
from start_llm.proxy.bodies import LONG_BYTES, Body, body_of
from start_llm.proxy.chosen_server import choose
from start_llm.proxy.merged_pages import MergedPages
from start_llm.proxy.open_routes import OPEN_ROUTES
from start_llm.proxy.refusals import ProxyRefusal, refuse, tell_server, with_note
from start_llm.proxy.routing_names import RoutedConversations, RoutingNames, routing_names
from start_llm.proxy.server_group import RoutedServer, ServerGroup

_EXPLAINED_WITHIN_S = 30.0
_LEAST_SHARE = 0.5
"""A smaller part of a prompt is likely the instructions, which many conversations share."""
_MAYBE_GONE = (HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.SERVICE_UNAVAILABLE)
"""Statuses of which the server's own health tells whether another one can answer."""
_OF_MODELS, _OF_RESPONSES = "/v1/models/", "/v1/responses/{id}"
_COMPUTED = ("text", "embeddings")


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """What a request's server depends on.

    Attributes:
        headers: as ASGI has them.
        model: the name that it asks for, if any.
        response: the id of a response that a server keeps; empty if it needs none.
        is_computed: its server computes something, which it may keep.
    """

    match: RouteMatch
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    names: RoutingNames
    model: Json
    response: str
    is_computed: bool


class Routing:
    """ASGI middleware that chooses a server for each request, and another one if that is gone.

    Args:
        inside: sends a request to the chosen server (`choose`).
    """

    def __init__(self, inside: Application, group: ServerGroup) -> None:
        self._inside = inside
        self._group = group
        self._conversations = RoutedConversations()
        self._pages = MergedPages(group, self._conversations)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            async with self._group.watched():
                await self._inside(scope, receive, send)
            return
        match = OPEN_ROUTES.find(scope["method"], scope["path"])
        if page := self._pages.find(match.route):
            await page(scope, send)
            return
        read = (match, scope["headers"], body_of(scope))
        is_long = len(read[-1].raw) > LONG_BYTES
        request = await asyncio.to_thread(_read, *read) if is_long else _read(*read)
        await self._answer(request, scope, receive, send)

    async def _answer(self, request: RoutedRequest, scope: Any, receive: Receive, send: Send) -> None:
        """Let servers answer, one after the other, until one is there that does."""
        tried: set[str] = set()
        while able := self._able(request, tried):
            server = await self._choose(request, able)
            held = _HeldError(send)
            with _busy(server):
                await self._inside(with_note(scope, held.refusals.append), receive, held.take)
            tried.add(server.url)
            if not held.messages or not await self._is_gone(server, request, tried):
                await held.release()
                return
        await refuse(scope, send, Overloaded("No server that has this model takes requests now."))

    def _able(self, request: RoutedRequest, tried: Collection[str]) -> list[RoutedServer]:
        """Return who may answer: if only a response is named, any server, as its model is not known here."""
        names_no_model = bool(request.response) and request.model is None
        return self._group.able(request.model, tried, any_model=names_no_model)

    async def _is_gone(self, server: RoutedServer, request: RoutedRequest, tried: Collection[str]) -> bool:
        """Return whether a server has failed because it takes no requests any more, and another one does."""
        await self._group.look_at(server)
        return not server.is_able and bool(self._able(request, tried))

    async def _choose(self, request: RoutedRequest, able: Sequence[RoutedServer]) -> RoutedServer:
        server = await self._known(request, able) or self._any(request, able)
        if request.is_computed:
            self._conversations.note(request.names.names, server.url)
        return server

    async def _known(self, request: RoutedRequest, able: Sequence[RoutedServer]) -> RoutedServer | None:
        """Return the server that has this conversation; None if none is found."""
        if len(able) == 1:
            return able[0]
        if request.response and (keeper := await _keeper(request, able)):
            return keeper
        by_url = {server.url: server for server in able}
        if url := self._conversations.find(request.names.names, by_url.__contains__):
            return by_url[url]
        if request.names.goes_on and request.match.route.explained_by:
            return await _deepest(request, able)
        return None

    def _any(self, request: RoutedRequest, able: Sequence[RoutedServer]) -> RoutedServer:
        return self._group.take_least_busy(able) if request.is_computed else able[0]


def _read(match: RouteMatch, headers: Sequence[tuple[bytes, bytes]], body: Body) -> RoutedRequest:
    """Read of a request what its server depends on."""
    fields = body.fields.data
    by_name = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
    route = match.route
    names_model, names_response = (route.path.startswith(prefix) for prefix in (_OF_MODELS, _OF_RESPONSES))
    earlier = match.name if names_response else fields.get("previous_response_id")
    return RoutedRequest(
        match=match,
        headers=headers,
        body=body.raw,
        names=routing_names(route.body, fields, by_name),
        model=match.name if names_model else fields.get("model"),
        response=earlier if isinstance(earlier, str) else "",
        is_computed=route.explained_by is not None or route.body in _COMPUTED,
    )


async def _keeper(request: RoutedRequest, able: Sequence[RoutedServer]) -> RoutedServer | None:
    """Return the server that keeps the response; None if none does."""
    path = f"/v1/responses/{quote(request.response, safe='')}"
    answers = await _ask_all(able, "HEAD", path, request.headers, b"")
    return next(
        (server for server, answer in zip(able, answers, strict=True) if answer and answer.is_ok), None
    )


async def _deepest(request: RoutedRequest, able: Sequence[RoutedServer]) -> RoutedServer | None:
    """Return the server whose cache has most of the prompt, None if that is less than half of it."""
    path = request.match.route.explained_by or ""
    answers = await _ask_all(able, "POST", path, request.headers, request.body)
    shares = [_cached_share(answer) for answer in answers]
    most = max(shares)
    return able[shares.index(most)] if most >= _LEAST_SHARE else None


async def _ask_all(
    servers: Sequence[RoutedServer],
    method: str,
    path: str,
    headers: Sequence[tuple[bytes, bytes]],
    body: bytes,
) -> list[WholeAnswer | None]:
    answers = (
        server.backend.whole(method, path, headers, body, within_s=_EXPLAINED_WITHIN_S) for server in servers
    )
    return await asyncio.gather(*answers)


def _cached_share(answer: WholeAnswer | None) -> float:
    """Return the share of a prompt that a server says is cached; 0 if it says nothing of it."""
    try:
        explanation = answer.fields if answer and answer.is_ok else {}
        return explanation["cached_tokens"] / explanation["prompt_tokens"]
    except (LookupError, TypeError, ZeroDivisionError):
        return 0.0


@contextmanager
def _busy(server: RoutedServer) -> Generator[None]:
    server.in_flight += 1
    try:
        with choose(server.url):
            yield
    finally:
        server.in_flight -= 1


class _HeldError:
    """Passes a reply on to the client, but holds an error back that another server may answer better.

    Attributes:
        refusals: those of the proxy, of which the server learns once they are sent.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.messages: list[Any] = []
        self.refusals: list[ProxyRefusal] = []

    async def take(self, message: Any) -> None:
        if self.messages or (message["type"] == "http.response.start" and message["status"] in _MAYBE_GONE):
            self.messages.append(message)
        else:
            await self._send(message)

    async def release(self) -> None:
        for refusal in self.refusals:
            tell_server(refusal)
        for message in self.messages:
            await self._send(message)
