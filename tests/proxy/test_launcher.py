"""The proxy's life: it comes back, it ends with the server, and it never blocks on what it prints."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from start_llm.proxy.config import ProxyConfig, configuration, environment
from start_llm.proxy.launcher import Proxy, ProxyLog
from start_llm.proxy.ports import Process, is_free
from tests.conftest import TinyModel
from tests.proxy.conftest import Proxied, free_port, until
from tests.serving import wait_for_health

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ProxyConfig(
    port=4999,
    backend="http://127.0.0.1:1",
    model="m",
    window=4096,
    api_key=None,
    backend_key="backend",
    python=sys.executable,
)


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
def server_with_proxy(model: Path) -> Generator[tuple[subprocess.Popen[bytes], int, int]]:
    port, proxy_port = free_port(), free_port()
    command = [sys.executable, "-m", "start_llm", "serve", "--model", str(model)]
    ports = ["--mlx-port", str(port), "--proxy-port", str(proxy_port)]
    process = subprocess.Popen([*command, *ports], cwd=ROOT, stdout=subprocess.DEVNULL)
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


def test_a_killed_server_leaves_no_proxy(tiny_model: TinyModel):
    with server_with_proxy(tiny_model("qwen3")) as (process, _, proxy_port):
        child = proxy_of(proxy_port)
        process.kill()
        until(lambda: not child.is_running, within_s=10)
        assert is_free(proxy_port)
    (ROOT / "logs" / f"proxy-{proxy_port}.json").unlink()


def test_a_signal_gives_a_stream_a_moment_and_then_ends_everything(tiny_model: TinyModel):
    with server_with_proxy(tiny_model("qwen3")) as (process, _, proxy_port):
        child = proxy_of(proxy_port)
        connection = http.client.HTTPConnection("127.0.0.1", proxy_port, timeout=30)
        body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "stream": True}
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        reply = connection.getresponse()
        assert reply.readline().startswith(b"data: ")
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
        assert time.monotonic() - began < 8
        assert not child.is_running
        assert not (ROOT / "logs" / f"proxy-{proxy_port}.json").exists()
        connection.close()


def test_a_proxy_that_cannot_start_is_reported_and_tried_again(tmp_path: Path):
    said: list[str] = []
    broken = ProxyConfig(
        port=free_port(),
        backend="http://127.0.0.1:1",
        model="m",
        window=4096,
        api_key=None,
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
        api_key=None,
        backend_key="backend",
        python="/no/such/python",
    )
    proxy = Proxy(missing, say=said.append, patience_s=1, logs=tmp_path)
    proxy.start()
    until(lambda: any("/no/such/python" in line for line in said), within_s=10)
    proxy.stop()


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
