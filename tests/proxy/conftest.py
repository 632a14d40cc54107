"""One proxy for most tests, since it takes seconds to start, and one whose server is a process of its own."""

from __future__ import annotations

import http.client
import json
import os
import random
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Container, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from start_llm.access.backend_secret import BackendSecret
from start_llm.proxy.launcher import Proxy
from start_llm.proxy.ports import Process, is_free
from tests.conftest import TinyModel
from tests.proxy.tunnel import Tunnel
from tests.serving import Server, serving, wait_for_health

KEY = "open-sesame"
SECRET = BackendSecret("backend")
MODEL = "openai/local"
"""The only name that the proxy lists."""
WINDOW = 4096
DIRECT, PROXIED = 8080, 4000
"""The numbers that the two ports have unless somebody chooses others."""
ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / "logs"
NOBODY = ("00000000:0000", "00000000000000000000000000000000:0000")
MOST_LOOKS = 5


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
    notices: list[str]
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
    """Return a port below those that the system gives to whoever asks for any.

    A proxy takes seconds to listen. Meanwhile the system could give one of its own to another test's server,
    which would then answer in the proxy's place.
    """
    while not is_free(port := random.SystemRandom().randrange(20_000, 32_000)):
        pass
    return port


def until(condition: Any, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def watch_sockets(proxy: Proxy, partners: set[str], done: threading.Event) -> None:
    """Note the addresses at the other end of the proxy's sockets, fifty times a second. Linux only.

    The tables of the system's sockets take 10 ms to read, so that is done for new sockets alone. One that is
    connected to nobody in so many looks listens, or is none of a network.
    """
    looks = Counter[str]()
    while not done.wait(0.02):
        with suppress(OSError):
            looks = Counter({inode: looks[inode] for inode in sockets_of(proxy.pid)})
            if new := {inode for inode in looks if looks[inode] < MOST_LOOKS}:
                peers = dict(connected(new))
                partners.update(peers.values())
                looks.update(dict.fromkeys(new, 1) | dict.fromkeys(peers, MOST_LOOKS))


def sockets_of(pid: int | None) -> Iterator[str]:
    """Yield the inodes of a process's sockets."""
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # it was closed meanwhile
            target = os.readlink(entry.path)  # noqa: PTH115 - fifty times a second
            if target.startswith("socket:["):
                yield target[8:-1]


def connected(inodes: Container[str]) -> Iterator[tuple[str, str]]:
    """Yield those of some sockets that have an other end, with its address."""
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[9] in inodes and columns[2] not in NOBODY:
                yield columns[9], columns[2].partition(":")[0]


@pytest.fixture(scope="package")
def proxied(tiny_model: TinyModel, endpoints: Any) -> Generator[Proxied]:
    with serving(tiny_model("qwen3")) as server:
        endpoints.of(server, PROXIED)
        yield Proxied(
            server, endpoints.tunnel, endpoints.proxy, endpoints.port, endpoints.notices, endpoints.partners
        )


@dataclass(frozen=True)
class Processes:
    """A server and its proxy, in processes of their own, and what they put into temporary folders."""

    server: subprocess.Popen[bytes]
    port: int
    proxy_port: int
    temporary: Path

    @property
    def proxy(self) -> Process:
        record = json.loads((LOGS / f"proxy-{self.proxy_port}.json").read_text())
        return Process(record["pid"], record["started"])

    def left(self) -> list[str]:
        """The files and folders that are there for as long as they run."""
        folders = [path.name for path in self.temporary.glob("start_llm-*")]
        return folders + [path.name for path in LOGS.glob(f"proxy-{self.proxy_port}.*")]


@contextmanager
def processes(model: Path, temporary: Path, **environment: str) -> Generator[Processes]:
    port, proxy_port = free_port(), free_port()
    command = [sys.executable, "-m", "start_llm", "serve", "--model", str(model)]
    ports = ["--mlx-port", str(port), "--proxy-port", str(proxy_port)]
    environment = {**os.environ, "TMPDIR": str(temporary), **environment}
    process = subprocess.Popen([*command, *ports], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    try:
        wait_for_health(process, port)
        until(lambda: answers(proxy_port), within_s=90)
        yield Processes(process, port, proxy_port, temporary)
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


@pytest.fixture(scope="package")
def both_running(
    tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Callable[[], Processes]]:
    """`both_running()` starts a server and its proxy, unless those that it has started still run.

    `test_the_end`, which ends them, is the last file that asks for them.
    """
    folder, started = tmp_path_factory.mktemp("temporary"), list[Processes]()
    with ExitStack() as stack:

        def running() -> Processes:
            if not started or started[-1].server.poll() is not None:
                started.append(stack.enter_context(processes(tiny_model("qwen3"), folder)))
            return started[-1]

        yield running
