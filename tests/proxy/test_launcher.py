"""The proxy's life: it comes back, it ends with the server, and it never blocks on what it prints."""

from __future__ import annotations

import errno
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from start_llm.core.errors import PortError
from start_llm.proxy.config import ProxyConfig, configuration, environment
from start_llm.proxy.launcher import Proxy, ProxyLog, answers_end_to_end, claim_port
from start_llm.proxy.ports import Process, ProcessRecord, is_free
from tests.conftest import TinyModel
from tests.proxy.conftest import Proxied, free_port, until
from tests.serving import AS_JSON, wait_for_health

CHAT = "/v1/chat/completions"
ROOT = Path(__file__).resolve().parents[2]
CONFIG = ProxyConfig(
    port=4999,
    backend="http://127.0.0.1:1",
    model="m",
    window=4096,
    keys=(),
    backend_key="backend",
    python=sys.executable,
)


@pytest.mark.thorough
def test_a_killed_proxy_comes_back_and_the_server_never_noticed(proxied: Proxied):
    first = proxied.proxy.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    until(lambda: proxied.proxy.pid != first, within_s=10)
    assert proxied.server.get("/health")["status"] == "ok"
    until(lambda: proxied.proxy.is_ready, within_s=60)
    assert any("Starting it again" in line for line in proxied.said)
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    assert proxied.ask("/v1/chat/completions", body).status == 200


@contextmanager
def server_with_proxy(model: Path, **environment: str) -> Generator[tuple[subprocess.Popen[bytes], int, int]]:
    """Its process, its port, and that of its proxy."""
    port, proxy_port = free_port(), free_port()
    command = [sys.executable, "-m", "start_llm", "serve", "--model", str(model)]
    ports = ["--mlx-port", str(port), "--proxy-port", str(proxy_port)]
    process = subprocess.Popen(
        [*command, *ports], cwd=ROOT, env=os.environ | environment, stdout=subprocess.DEVNULL
    )
    try:
        wait_for_health(process, port)
        until(lambda: answers(proxy_port), within_s=90)
        yield process, port, proxy_port
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/health/liveliness")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def proxy_of(port: int) -> Process:
    said = json.loads((ROOT / "logs" / f"proxy-{port}.json").read_text())
    return Process(said["pid"], said["started"])


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the processes of a test put what they throw away."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def left_after(temporary: Path, proxy_port: int) -> list[str]:
    folders = [path.name for path in temporary.glob("start_llm-*")]
    return folders + [path.name for path in (ROOT / "logs").glob(f"proxy-{proxy_port}.*")]


def test_a_killed_server_leaves_no_proxy(tiny_model: TinyModel, temporary: Path):
    with server_with_proxy(tiny_model("qwen3")) as (process, port, proxy_port):
        child = proxy_of(proxy_port)
        process.kill()
        until(lambda: not child.is_running, within_s=6)
        assert is_free(proxy_port)
        assert is_free(port)
        # Its own record and lock are all that it could not take away, and they stop nobody.
        assert sorted(left_after(temporary, proxy_port)) == [
            f"proxy-{proxy_port}.{end}" for end in ("json", "lock")
        ]
        claim_port(proxy_port, ROOT / "logs", print).release()
    (ROOT / "logs" / f"proxy-{proxy_port}.json").unlink()


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


@pytest.mark.thorough
def test_a_signal_lets_streams_on_both_ports_end_and_cuts_those_that_do_not(
    tiny_model: TinyModel, temporary: Path
):
    with server_with_proxy(tiny_model("qwen3"), DRAIN_SECONDS="10") as (process, port, proxy_port):
        child = proxy_of(proxy_port)
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
        assert left_after(temporary, proxy_port) == []


def refuses_a_second_server(pid: int, proxy_port: int) -> None:
    """Whoever takes the proxy of a running server for one that was left behind would end it."""
    with pytest.raises(PortError, match=rf"belongs to a server that is running \(pid {pid}\)"):
        claim_port(proxy_port, ROOT / "logs", print)


@pytest.mark.thorough
def test_a_second_signal_leaves_nothing_behind_either(tiny_model: TinyModel, temporary: Path):
    with server_with_proxy(tiny_model("qwen3"), DRAIN_SECONDS="60") as (process, port, proxy_port):
        child = proxy_of(proxy_port)
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
        assert left_after(temporary, proxy_port) == []
        connection.close()


def test_a_proxy_that_cannot_start_is_reported_and_tried_again(tmp_path: Path):
    said: list[str] = []
    broken = ProxyConfig(
        port=free_port(),
        backend="http://127.0.0.1:1",
        model="m",
        window=4096,
        keys=(),
        backend_key="backend",
        python="/bin/false",
    )
    proxy = Proxy(broken, say=said.append, patience_s=1, logs=tmp_path)
    proxy.start()
    until(lambda: sum("Starting it again" in line for line in said) >= 2, within_s=10)
    proxy.stop()
    assert proxy.pid is None
    assert not proxy.is_ready


def test_an_interpreter_that_does_not_exist_is_reported(tmp_path: Path):
    said: list[str] = []
    missing = ProxyConfig(
        port=free_port(),
        backend="http://127.0.0.1:1",
        model="m",
        window=4096,
        keys=(),
        backend_key="backend",
        python="/no/such/python",
    )
    proxy = Proxy(missing, say=said.append, patience_s=1, logs=tmp_path)
    proxy.start()
    until(lambda: any("/no/such/python" in line for line in said), within_s=10)
    proxy.stop()


def test_a_proxy_that_cannot_be_written_down_serves_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def no_room(record: ProcessRecord, process: Process) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ProcessRecord, "write", no_room)
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeper.chmod(0o700)
    said: list[str] = []
    proxy = Proxy(
        replace(CONFIG, port=free_port(), python=str(sleeper)), say=said.append, patience_s=60, logs=tmp_path
    )
    proxy.start()
    until(lambda: any("written down" in log.read_text() for log in tmp_path.rglob("*.log")), within_s=10)
    child = proxy.pid
    time.sleep(0.5)
    assert proxy.pid == child
    assert not any("Starting it again" in line for line in said)
    proxy.stop()
    assert proxy.pid is None


@contextmanager
def answering(status: int) -> Generator[int]:
    """The port of something that answers every request so."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.end_headers()

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            """Says nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    ("status", "is_answer"),
    [(200, True), (400, True), (401, False), (404, False), (500, False), (503, False)],
)
def test_the_servers_refusal_of_a_chat_shows_that_requests_reach_it(status: int, is_answer: bool):
    """A model without a chat template refuses them all."""
    with answering(status) as port:
        assert answers_end_to_end(replace(CONFIG, port=port)) == is_answer


def test_nobody_is_no_answer():
    assert not answers_end_to_end(replace(CONFIG, port=free_port()))


def test_a_megabyte_of_output_blocks_nobody_and_rotates(tmp_path: Path):
    log = ProxyLog(tmp_path / "proxy.log")
    command = [sys.executable, "-c", "for i in range(60_000): print('x' * 100)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        drain = threading.Thread(target=log.drain, args=(process.stdout,))
        drain.start()
        assert process.wait(30) == 0
        drain.join(10)
    log.close()
    assert sum(1 for _ in tmp_path.glob("proxy.log*")) > 1
    assert all(path.stat().st_size <= 2 * 2**20 for path in tmp_path.iterdir())
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    "name", ["DATABASE_URL", "REDIS_HOST", "HTTPS_PROXY", "LITELLM_LOG_FILE", "LD_PRELOAD"]
)
def test_the_environment_of_the_user_does_not_change_the_proxy(name: str):
    assert name not in environment(CONFIG, {name: "x", "HOME": "/h"})
    assert environment(CONFIG, {"HOME": "/h"})["HOME"] == "/h"


def test_the_master_key_is_new_each_time_and_stands_in_no_file():
    first, second = (environment(CONFIG, {})["LITELLM_MASTER_KEY"] for _ in range(2))
    assert first != second
    assert first not in configuration(CONFIG)


def test_every_name_leads_to_the_server():
    models = json.loads(configuration(CONFIG))["model_list"]
    assert [entry["model_name"] for entry in models] == ["m", "*"]
    assert {entry["litellm_params"]["api_base"] for entry in models} == {"http://127.0.0.1:1/v1"}
