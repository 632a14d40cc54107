"""Clients that do not send what they have begun are hung up on, others are waited for; without LiteLLM."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn

from start_llm.access.backend_secret import BackendSecret
from start_llm.proxy.config import HEADER_S, IDLE_S, ProxyConfig, environment
from start_llm.proxy.half_open import KeptHalfOpen
from tests.flat_settings import settings_of

SOON_S, LATER_S = 0.05, 30.0
HEAD = b"GET /%d HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def echo(scope: Any, _receive: Any, send: Any) -> None:
    """Answer with the path, after as many seconds as the query says."""
    await asyncio.sleep(float(scope["query_string"] or 0))
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


@contextmanager
def connected(*, idle_s: float = LATER_S, header_s: float = LATER_S) -> Generator[socket.socket]:
    """A connection to an application behind the proxy's HTTP protocol."""
    protocol: Any = partial(KeptHalfOpen, idle_s, header_s)
    keep_alive: Any = idle_s
    config = uvicorn.Config(
        echo, http=protocol, timeout_keep_alive=keep_alive, lifespan="off", log_config=None
    )
    server = uvicorn.Server(config)
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        with socket.create_connection(listening.getsockname(), timeout=10) as connection:
            yield connection
    finally:
        server.should_exit = True
        thread.join()


def answered(connection: socket.socket) -> bytes:
    """The body of the next answer."""
    reply = b""
    while not reply.partition(b"\r\n\r\n")[2]:
        part = connection.recv(4096)
        assert part, "it was hung up on"
        reply += part
    return reply.partition(b"\r\n\r\n")[2]


def trickle(connection: socket.socket) -> bytes:
    """Send one byte after the other until the other side says something, or hangs up.

    A connection that is closed while a byte of ours is unread is reset.
    """
    connection.settimeout(SOON_S / 5)
    for _ in range(200):
        try:
            connection.send(b"x")
            return connection.recv(100)
        except (ConnectionResetError, BrokenPipeError):
            return b""
        except TimeoutError:
            continue
    return b"nothing"


def test_who_says_nothing_is_hung_up_on():
    with connected(idle_s=SOON_S) as connection:
        assert connection.recv(1) == b""


def test_who_does_not_end_its_headers_is_hung_up_on_however_it_sends_them():
    with connected(header_s=SOON_S) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nx: ")
        assert trickle(connection) == b""


def test_so_is_who_does_not_end_those_of_its_next_request():
    with connected(header_s=SOON_S) as connection:
        connection.sendall(HEAD % 1)
        assert answered(connection) == b"/1"
        connection.sendall(HEAD[:3])
        assert connection.recv(1) == b""


def test_a_whole_request_has_any_time_for_its_answer():
    with connected(idle_s=0.3, header_s=0.3) as connection:
        head = b"GET /1?0.4 HTTP/1.1\r\nHost: localhost\r\n\r\n"
        connection.sendall(head[:9])
        connection.sendall(head[9:])
        assert answered(connection) == b"/1"


def test_requests_one_behind_the_other_are_answered():
    with connected() as connection:
        connection.sendall(HEAD % 1 + (HEAD % 2)[:9])
        assert answered(connection) == b"/1"
        connection.sendall((HEAD % 2)[9:])
        assert answered(connection) == b"/2"


def test_between_requests_a_connection_is_kept_as_long_as_the_setting_says():
    with connected(idle_s=SOON_S) as connection:
        connection.sendall(HEAD % 1)
        assert answered(connection) == b"/1"
        assert connection.recv(1) == b""


def test_the_times_are_those_of_the_server():
    settings = settings_of(proxy_port=4999, http_idle_s=77, header_s=8)
    config = ProxyConfig(
        settings=settings, backend="http://127.0.0.1:1", first_model="m", secret=BackendSecret("both")
    )
    given = environment(config, {})
    assert (float(given[IDLE_S]), float(given[HEADER_S])) == (77, 8)
