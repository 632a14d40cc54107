"""One proxy for all proxy tests: it takes seconds to start."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from start_llm.proxy.config import ProxyConfig
from start_llm.proxy.launcher import Proxy
from tests.conftest import TinyModel
from tests.proxy.tunnel import Tunnel
from tests.serving import Server, serving

KEY = "open-sesame"
BACKEND_KEY = "backend"
MODEL = "openai/tiny"
WINDOW = 4096
NOBODY = ("00000000:0000", "00000000000000000000000000000000:0000")


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Any
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


@dataclass(frozen=True)
class Proxied:
    """A server, the wire, and the proxy in front."""

    server: Server
    tunnel: Tunnel
    proxy: Proxy
    port: int
    said: list[str]
    partners: set[str]
    """Every address that the proxy was connected to, from its first moment on."""

    def ask(
        self, path: str, body: Any = None, *, method: str | None = None, headers: dict[str, str] | None = None
    ) -> Answer:
        sent = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"} | (headers or {})
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, sent, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return Answer(reply.status, reply.headers, reply.read().decode())
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.headers, error.read().decode())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Any, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def watch_sockets(proxy: Proxy, partners: set[str], done: threading.Event) -> None:
    """Note the addresses at the other end of the proxy's sockets, fifty times a second. Linux only."""
    while not done.wait(0.02):
        with suppress(OSError):
            folder = Path(f"/proc/{proxy.pid}/fd")
            inodes = {str(link.readlink())[8:-1] for link in folder.iterdir()}
            for table in ("tcp", "tcp6", "udp", "udp6"):
                for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                    columns = line.split()
                    if columns[9] in inodes and columns[2] not in NOBODY:
                        partners.add(columns[2].partition(":")[0])


@pytest.fixture(scope="package")
def proxied(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Generator[Proxied]:
    logs, said, partners, port = tmp_path_factory.mktemp("logs"), [], set[str](), free_port()
    with serving(tiny_model("qwen3")) as server:
        tunnel = Tunnel(server.port)
        config = ProxyConfig(
            port=port,
            backend=tunnel.url,
            model=MODEL,
            window=WINDOW,
            keys=(KEY,),
            backend_key=BACKEND_KEY,
            python=sys.executable,
        )
        proxy = Proxy(config, say=said.append, patience_s=60, logs=logs)
        proxy.start()
        watching = threading.Event()
        watcher = threading.Thread(target=watch_sockets, args=(proxy, partners, watching))
        watcher.start()
        try:
            until(lambda: proxy.is_ready, within_s=90)
            yield Proxied(server, tunnel, proxy, port, said, partners)
        finally:
            watching.set()
            watcher.join()
            proxy.stop()
            tunnel.close()
