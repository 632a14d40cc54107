"""Clients that close their side of the connection behind their request, through the proxy."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from start_llm.proxy.ports import is_connected
from tests.proxy.conftest import KEY, Proxied, until

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 40},
    "/v1/messages": {"messages": HI, "max_tokens": 40},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 40},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 40},
}
LONG = {"messages": [{"role": "user", "content": "word " * 30_000}], "max_tokens": 2}


def sent(proxied: Proxied, path: str, body: Any) -> socket.socket:
    """A connection with a whole request on it."""
    raw = json.dumps(body | {"model": "m"}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", proxied.port), timeout=60)
    connection.sendall(head.encode() + raw)
    return connection


def everything(connection: socket.socket) -> bytes:
    parts: list[bytes] = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
@pytest.mark.sample(8)
def test_a_client_that_closes_its_side_gets_its_answer(proxied: Proxied, path: str, stream: bool):
    with sent(proxied, path, ASKED[path] | {"stream": stream}) as connection:
        connection.shutdown(socket.SHUT_WR)
        reply = everything(connection)
    assert reply.startswith(b"HTTP/1.1 200 "), reply[:200]
    assert any(end in reply for end in (b"usage", b"[DONE]", b"message_stop"))


def prefill(proxied: Proxied) -> Any:
    return proxied.server.get("/stats")["engine"]["prefill"]


@pytest.mark.long
def test_one_that_goes_later_is_noticed_all_the_same(proxied: Proxied):
    with sent(proxied, CHAT, LONG) as connection:
        connection.shutdown(socket.SHUT_WR)
        until(lambda: prefill(proxied) is not None, within_s=20)
    until(lambda: prefill(proxied) is None, within_s=10)


def test_half_a_request_gets_nothing(proxied: Proxied):
    with socket.create_connection(("127.0.0.1", proxied.port), timeout=20) as connection:
        connection.sendall(b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        connection.shutdown(socket.SHUT_WR)
        assert b" 200 " not in everything(connection)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_an_end_of_a_connection_is_held_until_it_is_closed(family: socket.AddressFamily):
    host = "127.0.0.1" if family is socket.AF_INET else "::1"
    with socket.create_server((host, 0), family=family) as server:
        client = socket.create_connection(server.getsockname()[:2])
        accepted, _ = server.accept()
        ports = client.getsockname()[1], server.getsockname()[1]
        with accepted:
            assert is_connected(*ports)
            client.shutdown(socket.SHUT_WR)
            assert is_connected(*ports)
            client.close()
            assert not is_connected(*ports)
