"""The endpoints of an SDK: the server's own port, and that of the proxy, which stands before one server
at a time, since it takes seconds to start."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from anthropic import Anthropic, AsyncAnthropic
from openai import AsyncOpenAI, OpenAI

from start_llm.proxy.config import ProxyConfig
from start_llm.proxy.launcher import Proxy
from tests.flat_settings import settings_of
from tests.proxy.conftest import (
    DIRECT,
    KEY,
    MODEL,
    PROXIED,
    SECRET,
    free_port,
    until,
    watch_sockets,
)
from tests.proxy.tunnel import Tunnel
from tests.serving import Server


@dataclass(frozen=True, slots=True)
class Endpoint:
    server: Server
    url: str
    tunnel: Tunnel | None = None

    @property
    def is_proxied(self) -> bool:
        return self.tunnel is not None

    def lead(self) -> None:
        """See that the server behind the proxy is this one."""
        if self.tunnel:
            self.tunnel.lead_to(self.server.port)


class Endpoints:
    """The endpoints of any server. The proxy is started when it is first needed.

    Attributes:
        said: the lines for the terminal.
        partners: every address that the proxy was connected to, from its first moment on.
    """

    def __init__(self, logs: Path) -> None:
        self.tunnel, self.port = Tunnel(0), free_port()
        self.notices, self.partners = list[str](), set[str]()
        config = ProxyConfig(
            settings=settings_of(proxy_port=self.port, proxy_keys=(KEY,), proxy_model_id=MODEL),
            backend=self.tunnel.url,
            first_model=MODEL,
            secret=SECRET,
        )
        self.proxy = Proxy(config, say=self.notices.append, patience_s=120, logs=logs)
        self._is_closed = threading.Event()
        self._watcher = threading.Thread(
            target=watch_sockets, args=(self.proxy, self.partners, self._is_closed)
        )

    def of(self, server: Server, number: int) -> Endpoint:
        if number == DIRECT:
            return Endpoint(server, server.url)
        endpoint = Endpoint(server, f"http://127.0.0.1:{self.port}", self.tunnel)
        endpoint.lead()
        if not self._watcher.ident:
            self.proxy.start()
            self.proxy.expect_answers()
            self._watcher.start()
        until(lambda: self.proxy.is_ready, within_s=120)
        return endpoint

    def close(self) -> None:
        self._is_closed.set()
        if self._watcher.ident:
            self._watcher.join()
        self.proxy.stop()
        self.tunnel.close()


class Sync:
    """An SDK as most programs use it."""

    def __init__(self, endpoint: Endpoint, make: Any, **options: Any) -> None:
        self.endpoint = endpoint
        self._client = make(api_key=KEY, max_retries=0, **options)

    def call(self, method: str, *arguments: Any, **fields: Any) -> Any:
        self.endpoint.lead()
        return attrgetter(method)(self._client)(*arguments, **fields)

    def read(self, method: str, **fields: Any) -> list[Any]:
        """The events of a stream."""
        return list(self.call(method, stream=True, **fields))

    def read_with(self, method: str, last: str, **fields: Any) -> tuple[list[Any], Any]:
        """The events of the SDK's own stream reader, and what it puts together of them."""
        with self.call(method, **fields) as stream:
            return list(stream), getattr(stream, last)()

    def pages(self, method: str, *arguments: Any, **fields: Any) -> list[Any]:
        """All entries of a list, over as many pages as it has."""
        return list(self.call(method, *arguments, **fields))

    def close(self) -> None:
        self._client.close()


class Async:
    """The same calls through asyncio."""

    def __init__(self, endpoint: Endpoint, make: Any, **options: Any) -> None:
        self.endpoint = endpoint
        self._client = make(api_key=KEY, max_retries=0, **options)
        self._runner = asyncio.Runner()

    def call(self, method: str, *arguments: Any, **fields: Any) -> Any:
        async def run() -> Any:
            return await attrgetter(method)(self._client)(*arguments, **fields)

        self.endpoint.lead()
        return self._runner.run(run())

    def read(self, method: str, **fields: Any) -> list[Any]:
        async def run() -> list[Any]:
            return [event async for event in await attrgetter(method)(self._client)(stream=True, **fields)]

        self.endpoint.lead()
        return self._runner.run(run())

    def read_with(self, method: str, last: str, **fields: Any) -> tuple[list[Any], Any]:
        async def run() -> tuple[list[Any], Any]:
            async with attrgetter(method)(self._client)(**fields) as stream:
                return [event async for event in stream], await getattr(stream, last)()

        self.endpoint.lead()
        return self._runner.run(run())

    def pages(self, method: str, *arguments: Any, **fields: Any) -> list[Any]:
        async def run() -> list[Any]:
            return [entry async for entry in attrgetter(method)(self._client)(*arguments, **fields)]

        self.endpoint.lead()
        return self._runner.run(run())

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


type Client = Sync | Async
type Way = tuple[int, type[Sync | Async]]

WAYS: list[Way] = [(number, kind) for number in (DIRECT, PROXIED) for kind in (Sync, Async)]
WAY_NAMES = [f"{number}-{kind.__name__.lower()}" for number, kind in WAYS]


@contextmanager
def opened_endpoints(logs: Path) -> Generator[Endpoints]:
    endpoints = Endpoints(logs)
    try:
        yield endpoints
    finally:
        endpoints.close()


def openai_client(way: Way, server: Server, endpoints: Endpoints) -> Client:
    """The openai package at one of the endpoints."""
    number, kind = way
    endpoint = endpoints.of(server, number)
    return kind(endpoint, OpenAI if kind is Sync else AsyncOpenAI, base_url=f"{endpoint.url}/v1")


def anthropic_client(way: Way, server: Server, endpoints: Endpoints) -> Client:
    """The anthropic package at one of the endpoints."""
    number, kind = way
    endpoint = endpoints.of(server, number)
    return kind(endpoint, Anthropic if kind is Sync else AsyncAnthropic, base_url=endpoint.url)
