"""Sends the requests, several at once, and judges what comes back."""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from tests.fuzz.judge import judge
from tests.fuzz.requests import Request, request
from tests.grammar import wire
from tests.server.client import Client, CutOff, Reply

PATIENCE_S = 60.0
_KEPT = 64
_MAX_TRIES = 80


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that went wrong."""

    index: int
    asked: Request
    problem: str


@dataclass
class Fuzz:
    """All requests of a seed for one server.

    Attributes:
        make: makes the requests.
        counts: requests by kind, and replies by status; None is no reply where none is needed.
        slowest_s: of all requests that were read to their end.
        done: how many requests are over.
    """

    port: int
    seed: int
    requests: int
    make: Callable[[int, int, Sequence[str]], Request] = request
    failures: list[Failure] = field(default_factory=list[Failure])
    kinds: Counter[str] = field(default_factory=Counter[str])
    statuses: Counter[int | None] = field(default_factory=Counter[int | None])
    slowest_s: float = 0.0
    done: int = 0
    _kept: deque[str] = field(default_factory=lambda: deque[str](maxlen=_KEPT))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def play(self, connections: int) -> Iterator[int]:
        """Send them all. Yields how many are over, now and then."""
        indices = itertools.count()
        threads = [threading.Thread(target=self._work, args=(indices,)) for _ in range(connections)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            yield self.done
            time.sleep(0.2)

    def _work(self, indices: Iterator[int]) -> None:
        with Line(self.port) as line:
            while (index := next(indices)) < self.requests:
                with self._lock:
                    kept = list(self._kept)
                self._one(line, index, self.make(self.seed, index, kept))

    def _one(self, line: Line, index: int, asked: Request) -> None:
        began = time.monotonic()
        reply, problem = tried(line, asked)
        took = time.monotonic() - began
        with self._lock:
            self.done += 1
            self.kinds[asked.kind] += 1
            self.statuses[reply.status if reply else None] += 1
            self.slowest_s = max(self.slowest_s, took)
            if reply and reply.status == 200 and "/responses" in asked.target:
                self._kept.extend(_ids_in(reply))
            if problem:
                self.failures.append(Failure(index, asked, problem))


def _ids_in(reply: Reply) -> list[str]:
    _, key, rest = reply.body.partition(b'"id":')
    name = rest[:60].strip().strip(b'"').partition(b'"')[0].decode("ascii", "replace")
    return [name] if key and name.startswith("resp_") else []


# ------------------------------------------------------------------------------------------------- sending


class Line:
    """A connection that is opened again whenever the server or the request has ended it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._client: Client | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None

    def ask(self, asked: Request) -> Reply | None:
        """The reply; None if the client has gone, or the server has hung up without one.

        Raises:
            CutOff: the reply is cut.
            AssertionError, ValueError: the reply is no HTTP.
            TimeoutError: nothing came for `PATIENCE_S`.
        """
        if asked.ending != "read":
            self.close()
        if self._client is None:
            self._client = Client(self._port, patience_s=PATIENCE_S)
        try:
            return self._asked(self._client, asked)
        finally:
            if asked.ending != "read":
                self.close()

    def _asked(self, client: Client, asked: Request) -> Reply | None:
        with suppress(BrokenPipeError, ConnectionResetError):
            # A server that refuses a request at its head need not take all of the rest.
            client.send(asked.sent)
        if asked.ending == "reset":
            client.reset()
            return None
        if asked.ending == "leave":
            return None
        if asked.ending == "half close":
            with suppress(OSError):
                client.socket.shutdown(socket.SHUT_WR)
        reply = client.reply(has_body=asked.method != "HEAD")
        while reply.status == 100:
            reply = client.reply(has_body=asked.method != "HEAD")
        if reply.headers.get("connection") == "close":
            self.close()
        return reply


def tried(line: Line, asked: Request) -> tuple[Reply | None, str | None]:
    """The reply to a request, and what is wrong with it."""
    try:
        reply = line.ask(asked)
    except (CutOff, ConnectionError) as error:
        line.close()
        return None, None if asked.may_get_nothing else f"no whole reply: {error!r}"
    except (TimeoutError, *wire.COMPLAINTS) as error:
        line.close()
        return None, f"no reply in HTTP: {error!r}"
    if reply is None:
        return None, None if asked.may_get_nothing else "no reply"
    try:
        judge(asked, reply)
    except wire.COMPLAINTS as error:
        return reply, f"status {reply.status}: {type(error).__name__} {error}: {reply.body[:600]!r}"
    return reply, None


# ------------------------------------------------------------------------------------------------- shrinking


def shrunk(port: int, failure: Failure) -> Any:
    """A body with fewer members that fails in the same way, or the same one; None if it is no body."""
    body = failure.asked.body
    if not isinstance(body, dict):
        return None
    sign = failure.problem[:40]
    with Line(port) as line:
        for _ in range(_MAX_TRIES):
            smaller = next((less for less in _smaller(body) if _fails(line, failure.asked, less, sign)), None)
            if smaller is None:
                break
            body = smaller
    return body


def _fails(line: Line, asked: Request, body: Any, sign: str) -> bool:
    _, problem = tried(line, asked.with_body(body))
    return problem is not None and problem.startswith(sign)


def _smaller(value: Any) -> Iterator[Any]:
    """With one member or item less, the outer ones first."""
    if isinstance(value, dict):
        for name in value:
            yield {key: inner for key, inner in value.items() if key != name}
        for name, inner in value.items():
            yield from ({**value, name: smaller} for smaller in _smaller(inner))
    elif isinstance(value, list):
        for at in range(len(value)):
            yield [*value[:at], *value[at + 1 :]]
        for at, inner in enumerate(value):
            yield from ([*value[:at], smaller, *value[at + 1 :]] for smaller in _smaller(inner))


def asked_for(port: int, path: str) -> Any:
    """The JSON of a page."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("GET", path)
        return json.load(connection.getresponse())
    finally:
        connection.close()
