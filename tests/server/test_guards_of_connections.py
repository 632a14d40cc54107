"""The limits on one client's time and room: `tests/mutants` takes these guards away."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from start_llm.config.server_variables import HttpSettings
from start_llm.core.errors import ClientGone, Overloaded
from start_llm.engine.engine import Engine
from start_llm.engine.resources import EngineResources
from start_llm.protocols.seal import KEY_BYTES, Seal
from start_llm.server.connection import BoundedWriter, is_closed_by_peer
from start_llm.server.handler import Handler
from start_llm.server.listener import Connections, Listener, ServerContext
from start_llm.server.served_models import ServedModel
from start_llm.telemetry.metrics import EngineMetrics
from tests.engine.harness import uncached_resources
from tests.engine.test_guards import Counting
from tests.server.breakable import OneModel
from tests.server.client import Client, message
from tests.server.test_stuck import a_status

SHORT_S = 0.3
LONG_S = 30.0
TEXT = "/v1/completions"
NOTHING: Any = None


def opened(**limits: Any) -> Listener:
    """Every limit is long but those that are given."""
    usual: dict[str, Any] = {"idle_s": LONG_S, "header_s": LONG_S, "body_s": LONG_S, "write_s": LONG_S}
    listener = Listener("127.0.0.1", 0, Handler, HttpSettings(**{**usual, **limits}))
    listener.open(ServerContext(models=OneModel(NOTHING), library=NOTHING, seal=NOTHING))
    return listener


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def client_of(stack: ExitStack, listener: Listener) -> Client:
    stack.callback(listener.connections.close_all)
    stack.callback(listener.stop_accepting)
    return stack.enter_context(Client(listener.port, patience_s=5))


def test_who_says_nothing_is_hung_up_on(stack: ExitStack):
    assert client_of(stack, opened(idle_s=SHORT_S)).is_closed()


def test_who_does_not_end_its_headers_is_hung_up_on(stack: ExitStack):
    client = client_of(stack, opened(header_s=SHORT_S))
    client.send(b"GET /health HTTP/1.1\\r\\nA: b")
    assert client.is_closed()


def test_who_does_not_send_its_whole_body_gets_an_error(stack: ExitStack):
    client = client_of(stack, opened(body_s=SHORT_S))
    client.send(message("POST", TEXT, {"prompt": "x"})[:-1])
    assert client.reply().status == 408


def test_who_announces_too_much_is_refused_before_it_is_read(stack: ExitStack):
    client = client_of(stack, opened(max_body_bytes=1000))
    client.send(message("POST", TEXT, {"prompt": "x" * 1000})[:-900])
    assert client.reply().status == 413


def test_documents_in_documents_without_end_are_refused_and_the_connection_stays(stack: ExitStack):
    status = a_status(EngineMetrics())
    model = ServedModel(status.card, NOTHING, service=NOTHING, status=status, adapters=NOTHING)
    listener = Listener("127.0.0.1", 0, Handler, HttpSettings())
    listener.open(ServerContext(models=OneModel(model), library=NOTHING, seal=Seal(bytes(KEY_BYTES))))
    document: Any = {"type": "text", "text": "a"}
    for _ in range(300):
        document = {"type": "document", "source": {"type": "content", "content": [document]}}
    client = client_of(stack, listener)
    reply = client.ask(
        "POST", "/v1/messages", {"messages": [{"role": "user", "content": [document]}], "max_tokens": 1}
    )
    assert (reply.status, reply.json["error"]["message"]) == (400, "The body is nested too deeply.")
    assert client.ask("POST", "/v1/messages", {}).status == 400


@pytest.mark.timeout(10)  # who waits for ever fails soon
def test_who_reads_nothing_is_given_up():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        began = time.monotonic()
        with pytest.raises(ClientGone):
            BoundedWriter(ours, SHORT_S).write(bytes(2**24))
        assert time.monotonic() - began < 5


def test_who_has_hung_up_is_noticed():
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            assert not is_closed_by_peer(ours)
        assert is_closed_by_peer(ours)


def test_an_end_that_no_event_tells_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("start_llm.server.connection._CLOSED", 0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.send(b"x")
        assert not is_closed_by_peer(ours)
        ours.recv(1)
        theirs.shutdown(socket.SHUT_WR)
        assert is_closed_by_peer(ours)


def test_an_end_behind_unread_bytes_is_noticed():
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.send(b"x")
        assert is_closed_by_peer(ours)


def test_beyond_the_limit_an_idle_connection_gives_way_and_a_busy_one_does_not():
    connections, pairs = Connections(2), [socket.socketpair() for _ in range(4)]
    try:
        first, second, third, fourth = (ours for ours, _ in pairs)
        assert connections.admit(first)
        assert connections.admit(second)
        with connections.busy(first):
            assert connections.admit(third)
            assert is_closed_by_peer(pairs[1][1])
            with connections.busy(third):
                assert not connections.admit(fourth)
            assert not is_closed_by_peer(pairs[0][1])
    finally:
        for pair in pairs:
            for end in pair:
                end.close()


@pytest.mark.parametrize("begun", [b"G", message("POST", TEXT, {"prompt": "x"})[:-1]])
def test_who_does_not_end_a_request_gives_way(stack: ExitStack, begun: bytes):
    listener = opened(max_connections=1)
    first = client_of(stack, listener)
    first.send(begun)
    time.sleep(SHORT_S)
    with Client(listener.port, patience_s=5) as second:
        assert first.is_closed()
        second.send(b"GET /none HTTP/1.1\r\n\r\n")
        assert second.reply().status == 404


def test_headers_without_an_end_are_no_request(stack: ExitStack):
    client = client_of(stack, opened())
    client.send(b"GET /none HTTP/1.1\r\nHost: localh")
    client.socket.shutdown(socket.SHUT_WR)
    assert client.is_closed()


NONE = message("GET", "/none")


def test_an_empty_line_before_a_request_is_ignored(stack: ExitStack):
    """Also one that comes in parts, a line feed alone, and one before the first request."""
    client = client_of(stack, opened())
    for parts in ([b"\r\n", NONE], [b"\n", NONE], [b"\r", b"\n", NONE[:5], NONE[5:]], [b"\r\n" + NONE]):
        for part in parts:
            client.send(part)
            time.sleep(0.02)
        assert client.reply().status == 404


def test_behind_an_empty_line_a_client_may_be_silent_as_before_it(stack: ExitStack):
    client = client_of(stack, opened(header_s=SHORT_S))
    client.send(NONE + b"\r\n")
    assert client.reply().status == 404
    time.sleep(2 * SHORT_S)
    assert client.ask("GET", "/none").status == 404


@pytest.mark.parametrize("lines", [b"\r\n\r\n", b"\n\n", b"\r\n" * 9])
def test_who_sends_several_empty_lines_is_hung_up_on(stack: ExitStack, lines: bytes):
    client = client_of(stack, opened())
    assert client.ask("GET", "/none").status == 404
    client.send(lines + NONE)
    assert client.is_closed()


def test_who_sends_an_empty_line_and_nothing_else_is_hung_up_on(stack: ExitStack):
    client = client_of(stack, opened(idle_s=SHORT_S))
    client.send(b"\r\n")
    assert client.is_closed()


def test_a_full_queue_takes_nobody():
    def resources() -> EngineResources:
        return uncached_resources(
            Counting(has_state=False), lambda _: b"a", frozenset(), max_sequences=1, batches=False
        )

    engine = Engine(resources, EngineMetrics(), max_waiting=0)
    engine.start()
    try:
        with pytest.raises(Overloaded, match="0 requests are waiting already"):
            engine.submit(NOTHING)
    finally:
        engine.stop(5)
