"""The proxy ends with its server, however that ends: real processes, real signals."""

from __future__ import annotations

import http.client
import json
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from start_llm.core.errors import PortError
from start_llm.proxy.child import LAST_MOMENT_S
from start_llm.proxy.launcher import claim_port
from start_llm.proxy.ports import is_free
from tests.conftest import TinyModel
from tests.proxy.conftest import LOGS, Processes, processes, until
from tests.serving import AS_JSON

CHAT = "/v1/chat/completions"


@pytest.mark.thorough
def test_a_killed_server_leaves_no_proxy(both_running: Callable[[], Processes]):
    both = both_running()
    proxy = both.proxy
    connection, reply = streaming(both.proxy_port, most=10**5)
    both.server.kill()
    rest = reply.read().decode()
    connection.close()
    assert "the server ended in the middle of this reply" in rest.rpartition("data: ")[2]
    assert "TransferEncoding" not in rest
    until(lambda: not proxy.is_running, within_s=LAST_MOMENT_S + 4)
    assert is_free(both.proxy_port)
    assert is_free(both.port)
    # Its own record and lock are all that it could not take away, and they stop nobody.
    assert sorted(both.left()) == [f"proxy-{both.proxy_port}.{end}" for end in ("json", "lock")]
    claim_port(both.proxy_port, LOGS, print).release()
    (LOGS / f"proxy-{both.proxy_port}.json").unlink()


def streaming(port: int, most: int) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """A stream whose first text has come."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "max_tokens": most,
    }
    connection.request("POST", CHAT, json.dumps(body), AS_JSON)
    reply = connection.getresponse()
    assert reply.readline().startswith(b"data: ")
    return connection, reply


def status_of(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        connection.request("POST", CHAT, json.dumps(body), AS_JSON)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.long
def test_a_signal_lets_streams_on_both_ports_end_and_cuts_those_that_do_not(
    tiny_model: TinyModel, tmp_path: Path
):
    with processes(tiny_model("qwen3"), tmp_path, DRAIN_SECONDS="10") as both:
        process, port, proxy_port, child = both.server, both.port, both.proxy_port, both.proxy
        refuses_a_second_server(process.pid, proxy_port)
        assert child.is_running
        short, long = (
            [streaming(number, most=most) for number in (port, proxy_port)] for most in (100, 10**5)
        )
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        until(lambda: status_of(port) == 503, within_s=8)
        assert status_of(proxy_port) == 503
        for connection, reply in short:
            assert reply.read().rstrip().endswith(b"data: [DONE]")
            connection.close()
        assert process.wait(25) == 0
        assert time.monotonic() - began >= 10
        for connection, reply in long:
            with suppress(http.client.IncompleteRead, ConnectionResetError):
                assert b"[DONE]" not in reply.read()
            connection.close()
        assert not child.is_running
        assert is_free(port)
        assert is_free(proxy_port)
        assert both.left() == []


def refuses_a_second_server(pid: int, proxy_port: int) -> None:
    """Whoever takes the proxy of a running server for one that was left behind would end it."""
    with pytest.raises(PortError, match=rf"belongs to a server that is running \(pid {pid}\)"):
        claim_port(proxy_port, LOGS, print)


@pytest.mark.long
def test_a_second_signal_leaves_nothing_behind_either(tiny_model: TinyModel, tmp_path: Path):
    with processes(tiny_model("qwen3"), tmp_path, DRAIN_SECONDS="60") as both:
        process, port, proxy_port, child = both.server, both.port, both.proxy_port, both.proxy
        connection, _ = streaming(proxy_port, most=100_000)
        process.send_signal(signal.SIGTERM)
        until(lambda: status_of(port) == 503, within_s=10)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 130
        assert time.monotonic() - began < 1.5
        until(lambda: not child.is_running, within_s=3)
        assert is_free(port)
        assert is_free(proxy_port)
        assert both.left() == []
        connection.close()
