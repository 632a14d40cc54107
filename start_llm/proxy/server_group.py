"""The servers behind one proxy: which of them answer, with which models, and how much each has to do."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import anyio

from start_llm.proxy.backend import Backend, WholeAnswer

_LOOK_EVERY_S = 2.0
_ANSWER_WITHIN_S = 15.0
"""So long that a machine with much to do does not lose its conversations for it."""
_UNREACHABLE = "unreachable"

type Tell = Callable[[str], None]


class RoutedServer:
    """One of the servers, and what is known of it. For one event loop.

    Attributes:
        state: what its `/health` said last, or `unreachable`; empty before it was asked.
        models: the names of its models, those of the last time while it does not answer.
        default_model: the one that answers a request whose model nobody has.
        in_flight: requests that it answers for this proxy now.
        newest: the number of the last new conversation that it got.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.state = ""
        self.models: tuple[str, ...] = ()
        self.default_model = ""
        self.in_flight = 0
        self.newest = 0
        self._answers = False

    @property
    def url(self) -> str:
        return self.backend.url

    @property
    def name(self) -> str:
        """Its host and port."""
        return urlsplit(self.url).netloc

    @property
    def is_able(self) -> bool:
        """True while it takes new requests."""
        return self._answers and bool(self.models)

    async def look(self) -> None:
        """Ask the server how it is and which models it has."""
        health = await self.backend.whole("GET", "/health", within_s=_ANSWER_WITHIN_S)
        self._answers = health is not None and health.is_ok
        self.state = _state(health)
        if self._answers:
            listed = await self.backend.whole("GET", "/v1/models", within_s=_ANSWER_WITHIN_S)
            self._note_models(listed)

    def _note_models(self, answer: WholeAnswer | None) -> None:
        entries = entries_of(answer)
        is_own = answer is not None and answer.is_own
        if not entries or not is_own:
            self._answers, self.state = False, _problem(answer, is_own=is_own)
            return
        self.default_model = entries[0]["id"]
        self.models = tuple(name for entry in entries for name in (entry["id"], *entry.get("aliases", ())))


class ServerGroup:
    """All servers of a proxy; the first one is that which has started it.

    Args:
        tell: called with a sentence when a server stops or begins to take requests.
    """

    def __init__(self, backends: Iterable[Backend], tell: Tell) -> None:
        self.servers = tuple(map(RoutedServer, backends))
        self._tell = tell
        self._given = 0

    @asynccontextmanager
    async def watched(self) -> AsyncGenerator[None]:
        """Look at every server now, and every two seconds while the block runs."""
        await self._look_at_all()
        async with anyio.create_task_group() as group:
            group.start_soon(self._keep_looking)
            yield
            group.cancel_scope.cancel()

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self._look_at_all()

    async def _look_at_all(self) -> None:
        await asyncio.gather(*map(self.look_at, self.servers))

    async def look_at(self, server: RoutedServer) -> None:
        """Ask one server how it is now, and tell what has changed."""
        was_able, was = server.is_able, server.state
        await server.look()
        if was_able and not server.is_able:
            self._tell(f"{server.url} is {server.state}. Its conversations go to other servers.")
        elif server.is_able and not was_able:
            self._tell(f"{server.url} takes requests.")
        elif server.state != was:
            self._tell(f"{server.url} is {server.state}.")

    def able(
        self, model: object, without: Collection[str] = (), *, any_model: bool = False
    ) -> list[RoutedServer]:
        """Return the servers that take a request for this model now.

        A name that no server has means the default model of the first server that answers.

        Args:
            without: addresses of servers that are left out.
            any_model: return those with other models too.
        """
        having = [server for server in self.servers if any_model or model in server.models]
        if not having:
            default = next((server.default_model for server in self.servers if server.is_able), None)
            having = [server for server in self.servers if server.default_model == default]
        return [server for server in having if server.is_able and server.url not in without]

    def take_least_busy(self, able: Sequence[RoutedServer]) -> RoutedServer:
        """Give a new conversation to the server with the fewest requests now.

        Of several, it is the one whose last new conversation is the oldest.
        """
        server = min(able, key=lambda server: (server.in_flight, server.newest))
        self._given += 1
        server.newest = self._given
        return server


def entries_of(answer: WholeAnswer | None) -> list[dict[str, Any]]:
    """Return the entries of a list of models; none if the answer is none."""
    data = answer.fields.get("data") if answer and answer.is_ok else None
    entries = data if isinstance(data, list) else []
    return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]


def _state(health: WholeAnswer | None) -> str:
    """Return the word with which a server says how it is."""
    if health is None:
        return _UNREACHABLE
    state = health.fields.get("status")
    return state if isinstance(state, str) and state.isalpha() else f"answering {health.status}"


def _problem(answer: WholeAnswer | None, *, is_own: bool) -> str:
    """Return why no requests go to a server: it would take all clients of the proxy for one tenant, say."""
    if answer is None:
        return _UNREACHABLE
    return "without a model" if is_own else "a server that does not have this proxy's BACKEND_SECRET"
