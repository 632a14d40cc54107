"""Connections: deadlines, patience, reuse, and how many there may be."""

from __future__ import annotations

import errno
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from start_llm.access import loopback
from start_llm.access.loopback import IPV4_LOOPBACK, IPV6_LOOPBACK, bound_socket, loopback_addresses
from start_llm.config.server_variables import HttpSettings
from start_llm.core.errors import PortError
from start_llm.proxy.ports import is_free
from start_llm.server.handler import Handler
from start_llm.server.listener import Listener
from tests.server.client import CHAT, TEXT, Client, CutOff, ask, engine_is_free, message, stats, wait_until
from tests.serving import AS_JSON, Server, serving

HELLO = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
ENDLESS = {"prompt": [1, 2, 3], "stream": True}


def text_of(reply: Any) -> str:
    return reply.json["choices"][0]["message"]["content"]


# ------------------------------------------------------------------------------------- deadlines, patience


@pytest.fixture(scope="module")
def strict(endless_model: Path) -> Iterator[Server]:
    with serving(endless_model, header_s=0.5, body_s=0.5, write_s=0.5) as server:
        yield server


def drip(client: Client, data: bytes, stop: threading.Event) -> None:
    """Send a byte every 20 ms, which no time-out between two bytes would notice."""
    with suppress(OSError):
        for index in range(len(data)):
            client.send(data[index : index + 1])
            if stop.wait(0.02):
                return


@pytest.fixture
def dripping(strict: Server) -> Iterator[Any]:
    """`dripping(first, rest)` gives a client that has sent the first part at once and drips the rest."""
    stop, stack, threads = threading.Event(), ExitStack(), list[threading.Thread]()

    def start(first: bytes, rest: bytes) -> Client:
        client = stack.enter_context(Client(strict.port))
        client.send(first)
        threads.append(threading.Thread(target=drip, args=(client, rest, stop)))
        threads[-1].start()
        return client

    with stack:
        yield start
        stop.set()
        for thread in threads:
            thread.join()


def test_headers_that_drip_in_are_cut_off_at_their_deadline(dripping: Any):
    began = time.monotonic()
    client = dripping(b"GET /health HTTP/1.1\r\n", b"A: " + b"x" * 500)
    assert client.is_closed()
    assert 0.4 < time.monotonic() - began < 3


def test_a_body_that_drips_in_is_cut_off_at_its_deadline(dripping: Any):
    began = time.monotonic()
    request = message("POST", TEXT, {"prompt": "x" * 500})
    client = dripping(request[:-500], request[-500:])
    assert client.reply().status == 408
    assert 0.4 < time.monotonic() - began < 3
    assert client.is_closed()


@pytest.mark.thorough
def test_a_client_that_reads_nothing_is_given_up_and_frees_the_engine(strict: Server):
    cancelled = stats(strict.port)["requests"]["endings"].get("cancelled", 0)
    large_events = ENDLESS | {"model": "m" * 100_000}  # echoed in each event, so that buffers are soon full
    with Client(strict.port, receive_buffer=4096) as client:
        client.request("POST", TEXT, large_events)
        wait_until(lambda: stats(strict.port)["batch"]["active_rows"] == 1, within_s=5)
        wait_until(lambda: engine_is_free(strict.port), within_s=10)
        assert stats(strict.port)["requests"]["endings"]["cancelled"] == cancelled + 1
        with pytest.raises(CutOff):
            list(client.reply().body)


@pytest.mark.long
def test_a_client_that_reads_slowly_but_steadily_gets_everything(strict: Server):
    name = "m" * 24_000_000
    with Client(strict.port, receive_buffer=65536) as client:
        client.request("POST", TEXT, {"prompt": [1], "max_tokens": 1, "model": name})
        began = time.monotonic()
        status, headers = client.head()
        body = bytearray()
        while len(body) < int(headers["content-length"]):
            body += client.some(65536)
            time.sleep(0.004)  # far less than the 0.5 s after which a client counts as dead
        assert time.monotonic() - began > 1
        assert (status, json.loads(body)["model"]) == (200, name)


# ------------------------------------------------------------------------------------------------- reuse


def test_one_connection_serves_request_after_request(scripted: Server):
    with Client(scripted.port) as client:
        for _ in range(3):
            assert client.ask("GET", "/health").json["status"] == "ok"
            assert text_of(client.ask("POST", CHAT, HELLO)) == "Hello you there."
            assert client.ask("POST", CHAT, HELLO | {"stream": True}).body.endswith(b"data: [DONE]\n\n")
            assert client.ask("POST", CHAT, {}).status == 400


def test_pipelined_requests_are_answered_in_their_order(scripted: Server):
    with Client(scripted.port) as client:
        names = [f"request {number}" for number in range(5)]
        client.send(b"".join(message("POST", CHAT, HELLO | {"model": name}) for name in names))
        assert [client.reply().json["model"] for _ in names] == names


@pytest.mark.parametrize("end", [b"\r\n", b"\n"])
def test_an_empty_line_before_each_request_changes_nothing(scripted: Server, end: bytes):
    """RFC 9112, 2.2: some clients end the body of a request with a line end that belongs to nothing."""
    with Client(scripted.port) as client:
        for _ in range(3):
            client.send(end)
            assert text_of(client.ask("POST", CHAT, HELLO)) == "Hello you there."
        client.send(b"".join(end + message("POST", CHAT, HELLO | {"model": name}) for name in "abc"))
        assert [client.reply().json["model"] for _ in "abc"] == ["a", "b", "c"]


@pytest.mark.parametrize("headers", [{"Connection": "close"}, {"Connection": "Close"}])
def test_a_client_that_asks_for_it_is_hung_up_on_after_its_reply(scripted: Server, headers: dict[str, str]):
    with Client(scripted.port) as client:
        assert text_of(client.ask("POST", CHAT, HELLO, headers)) == "Hello you there."
        assert client.is_closed()


def test_http_1_0_gets_a_plain_body_and_a_closed_connection(scripted: Server):
    with Client(scripted.port) as client:
        client.send(message("POST", CHAT, HELLO, version="1.0"))
        assert text_of(client.reply()) == "Hello you there."
        assert client.is_closed()


def test_http_1_0_gets_a_stream_without_chunks(scripted: Server):
    with Client(scripted.port) as client:
        client.send(message("POST", CHAT, HELLO | {"stream": True}, version="1.0"))
        reply = client.reply()
        assert "transfer-encoding" not in reply.headers
        assert reply.body.startswith(b"data: {")
        assert reply.body.endswith(b"data: [DONE]\n\n")


def test_http_1_0_keeps_a_connection_that_it_asks_to_keep(scripted: Server):
    with Client(scripted.port) as client:
        for _ in range(2):
            client.send(message("POST", CHAT, HELLO, {"Connection": "keep-alive"}, version="1.0"))
            assert text_of(client.reply()) == "Hello you there."


def test_a_client_that_waits_for_100_continue_gets_it_before_its_body(scripted: Server):
    body = json.dumps(HELLO).encode()
    with Client(scripted.port) as client:
        client.request(
            "POST", CHAT, headers=AS_JSON | {"Expect": "100-continue", "Content-Length": str(len(body))}
        )
        assert client.reply().status == 100
        client.send(body)
        assert text_of(client.reply()) == "Hello you there."


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/stats", "/nothing"])
def test_head_gives_the_headers_of_get_and_no_body(scripted: Server, path: str):
    with Client(scripted.port) as client:
        got, headed = client.ask("GET", path), client.ask("HEAD", path)
        assert headed.status == got.status
        assert headed.headers.keys() == got.headers.keys()
        assert int(headed.headers["content-length"]) > 0
        assert client.ask("GET", "/health").status == 200


@pytest.mark.sample(2)
@pytest.mark.parametrize("suffix", ["?limit=1000", "/", "/?beta=true&x=%00", "?", "//"])
def test_query_strings_and_trailing_slashes_do_not_matter(scripted: Server, suffix: str):
    for path in ("/health", "/stats", "/v1/models", "/models"):
        assert ask(scripted.port, "GET", path + suffix).status == 200
    for path in (CHAT, "/chat/completions"):
        assert text_of(ask(scripted.port, "POST", path + suffix, HELLO)) == "Hello you there."
    assert (
        ask(scripted.port, "POST", "/completions" + suffix, {"prompt": "Hi", "max_tokens": 1}).status == 200
    )


# ------------------------------------------------------------------------------------ how many there may be


@pytest.fixture
def few(endless_model: Path) -> Iterator[Server]:
    """A server for three connections."""
    with serving(endless_model, max_connections=3) as server:
        yield server


def connected(stack: ExitStack, server: Server) -> Client:
    """A client that has been served once, so that the server knows it."""
    client = stack.enter_context(Client(server.port))
    assert client.ask("GET", "/health").status == 200
    return client


def test_beyond_the_limit_the_longest_idle_connection_gives_way(few: Server):
    with ExitStack() as stack:
        first = connected(stack, few)
        settle()
        second = connected(stack, few)
        settle()
        third = connected(stack, few)
        assert first.ask("GET", "/health").status == 200  # now the second has been idle for longest
        settle()
        connected(stack, few)
        assert second.is_closed()
        assert all(client.ask("GET", "/health").status == 200 for client in (first, third))


def settle() -> None:
    """A connection counts as idle only a moment after its client has the reply, and nothing shows when."""
    time.sleep(0.1)


def test_busy_connections_are_kept_and_one_more_client_is_asked_to_come_back(few: Server):
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(few.port)) for _ in range(3)]
        for client in clients:
            client.request("POST", TEXT, ENDLESS)
        streams = [client.events() for client in clients if client.head()[0] == 200]
        with Client(few.port) as late:
            refused = late.ask("POST", TEXT, ENDLESS)
            assert (refused.status, refused.error["type"]) == (503, "overloaded_error")
            assert int(refused.headers["retry-after"]) > 0
            assert late.is_closed()
        assert all(next(events)["object"] == "text_completion" for events in streams)
        clients[0].close()
        wait_until(lambda: is_let_in(few), within_s=3)
        assert all(next(events)["object"] == "text_completion" for events in streams[1:])


HALF_SENT = {
    "a byte": b"G",
    "headers": b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: ",
    "a body": message("POST", TEXT, {"prompt": "x" * 500})[:-400],
}


@pytest.mark.thorough
@pytest.mark.parametrize("begun", HALF_SENT)
def test_whoever_does_not_end_a_request_gives_way_to_those_who_do(few: Server, begun: str):
    with ExitStack() as stack:
        running = stack.enter_context(Client(few.port))
        running.request("POST", TEXT, ENDLESS)
        events = running.events() if running.head()[0] == 200 else iter(())
        slow: list[Client] = []
        for number in range(12):
            slow.append(stack.enter_context(Client(few.port, patience_s=5)))
            slow[-1].send(HALF_SENT[begun])
            settle()
            if number % 4 == 3:
                assert ask(few.port, "GET", "/health").status == 200
        assert slow[0].is_closed(), "the oldest gives way first"
        assert next(events)["object"] == "text_completion", "it was not closed"


def test_a_new_client_may_take_its_time_while_older_ones_are_half_way(few: Server):
    with ExitStack() as stack:
        slow = [stack.enter_context(Client(few.port, patience_s=5)) for _ in range(3)]
        for client in slow:
            client.send(HALF_SENT["headers"])
            settle()
        late = stack.enter_context(Client(few.port))
        head, rest = b"GET /health HTTP/1.1\r\n", b"Host: localhost\r\n\r\n"
        late.send(head)
        settle()
        assert slow[0].is_closed()
        late.send(rest)
        assert late.reply().status == 200


def is_let_in(server: Server) -> bool:
    with suppress(OSError, CutOff):
        return ask(server.port, "GET", "/health").status == 200
    return False


def test_clients_that_have_left_take_no_room(few: Server):
    with ExitStack() as stack:
        idle = connected(stack, few)
        for _ in range(10):
            with Client(few.port) as client:
                assert client.ask("GET", "/health", headers={"Connection": "close"}).status == 200
                assert client.is_closed()
        assert idle.ask("GET", "/health").status == 200


# --------------------------------------------------------------------------------------------- both loopbacks

HAS_IPV6 = IPV6_LOOPBACK in loopback_addresses()


@pytest.mark.skipif(not HAS_IPV6, reason="this system has no IPv6")
def test_both_loopback_addresses_answer_until_the_server_stops(scripted_model: Path):
    with serving(scripted_model) as server:
        for host in (IPV4_LOOPBACK, IPV6_LOOPBACK, "localhost"):
            connection = http.client.HTTPConnection(host, server.port, timeout=30)
            connection.request("POST", CHAT, json.dumps(HELLO), AS_JSON)
            assert connection.getresponse().status == 200
            connection.close()
    for host in (IPV4_LOOPBACK, IPV6_LOOPBACK):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, server.port), timeout=5)


def test_an_address_of_a_family_that_the_system_has_not_is_said_and_not_that_the_port_is_taken(
    monkeypatch: pytest.MonkeyPatch,
):
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(socket, "socket", refuse)
    with pytest.raises(PortError, match=r"MLX_HOST=::1 .* Address family not supported by protocol\.$"):
        Listener(IPV6_LOOPBACK, 0, Handler, HttpSettings())


def test_a_connection_that_takes_no_options_is_served(monkeypatch: pytest.MonkeyPatch):
    """macOS refuses them for one that its client has reset."""
    with socket.create_server((IPV4_LOOPBACK, 0)) as server, socket.create_connection(server.getsockname()):
        accepted, _ = server.accept()

    class Refusing:
        def setsockopt(self, *_: Any) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

        def __getattr__(self, name: str) -> Any:
            return getattr(accepted, name)

    handler: Any = Handler.__new__(Handler)
    handler.server, handler.request = SimpleNamespace(limits=HttpSettings()), Refusing()
    with accepted:
        handler.setup()
    assert handler.connection is handler.request


@pytest.mark.skipif(not HAS_IPV6, reason="this system has no IPv6")
def test_a_port_that_another_server_has_at_the_other_address_is_refused():
    with bound_socket(IPV6_LOOPBACK, 0) as other:
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortError, match=f"MLX_PORT={port} cannot be listened on.* Another server may be"):
            Listener(IPV4_LOOPBACK, port, Handler, HttpSettings())
        assert not is_free(port)
    listener = Listener(IPV4_LOOPBACK, port, Handler, HttpSettings())
    assert not is_free(port)
    listener.stop_accepting()
    assert is_free(port)


def test_a_system_without_ipv6_has_one_address(monkeypatch: pytest.MonkeyPatch):
    def without_ipv6(address: str, port: int) -> socket.socket:
        if address == IPV6_LOOPBACK:
            raise OSError(errno.EADDRNOTAVAIL, "no such address")
        return bound_socket(address, port)

    monkeypatch.setattr(loopback, "bound_socket", without_ipv6)
    assert loopback_addresses() == (IPV4_LOOPBACK,)
    listener = Listener(IPV4_LOOPBACK, 0, Handler, HttpSettings())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((IPV6_LOOPBACK, listener.port), timeout=5)
    listener.stop_accepting()
