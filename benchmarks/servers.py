"""Servers in processes of their own, and what clients do with them."""

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
AS_JSON = {"Content-Type": "application/json"}
_PAUSE_S = 0.1
_STOP_S = 15
_PATIENCE_S = 600


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_llm(*options: str) -> list[str]:
    """The command that serves with these options."""
    return [sys.executable, "-m", "start_llm", "serve", *options]


def health_seconds(port: int) -> float:
    """Seconds that one `GET /health` takes."""
    began = time.perf_counter()
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", "/health")
        connection.getresponse().read()
    return time.perf_counter() - began


def ask(port: int, path: str, body: object | None = None) -> Any:
    """POST, or GET without a body, and return the answer's JSON.

    Raises:
        OSError, http.client.HTTPException, ValueError: the server is dead, or dies while it answers.
    """
    with closing(send(port, path, body)) as connection:
        return json.load(connection.getresponse())


def send(port: int, path: str, body: object | None = None) -> http.client.HTTPConnection:
    """POST, or GET without a body. The caller reads the answer, and closes."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE_S)
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    connection.request("GET" if body is None else "POST", path, data, AS_JSON)
    return connection


def events(port: int, path: str, body: Mapping[str, Any]) -> Generator[Any]:
    """The events of a stream as they come, without the last one.

    Raises:
        SystemExit: the stream is refused, fails, or is cut.
    """
    with closing(send(port, path, {**body, "stream": True})) as connection:
        reply = connection.getresponse()
        if reply.status != http.HTTPStatus.OK:
            raise SystemExit(f"A stream was refused: {reply.read()[:500]!r}")
        for line in reply:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise SystemExit(f"A stream failed: {event}")
                yield event
            elif line.startswith(b"data: [DONE]"):
                return
        raise SystemExit("A stream was cut.")


def bare_socket(port: int, path: str, body: bytes) -> socket.socket:
    """A connection on which a body was sent: its client takes as little of the machine as can be."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(head.encode() + body)
    return connection


@dataclass(frozen=True)
class Served:
    """A server that runs: its port, the proxy's (0 without one), and its process."""

    port: int
    proxy_port: int
    pid: int

    def resident_bytes(self) -> int:
        """Linux only, like the next one."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def cpu_s(self) -> float:
        """CPU seconds that all threads have used so far."""
        return cpu_s(self.pid)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far; nan where there is no /proc."""
    if not Path("/proc").is_dir():
        return float("nan")
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def served(*options: object, proxy: bool = False, log: Path | None = None) -> Generator[Served]:
    """start_llm with these options of `serve`, from the moment that all its ports answer."""
    port, proxy_port = free_port(), free_port()
    ends = ["--proxy-port", str(proxy_port)] if proxy else ["--no-proxy"]
    command = start_llm(*map(str, options), "--mlx-port", str(port), *ends)
    probes = [partial(health_seconds, probed) for probed in ((port, proxy_port) if proxy else (port,))]
    with running(command, *probes, log=log) as pid:
        yield Served(port, proxy_port, pid)


@contextmanager
def served_by_mlx_lm(model: Path, *options: str, log: Path) -> Generator[Served]:
    """mlx_lm.server with these options, from the moment that it answers."""
    port = free_port()
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model), "--port", str(port), *options]
    with running(command, partial(health_seconds, port), log=log) as pid:
        yield Served(port, 0, pid)


@contextmanager
def running(
    command: Sequence[str],
    *probes: Callable[[], object],
    patience_s: float = _PATIENCE_S,
    log: Path | None = None,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
) -> Generator[int]:
    """A server in a process of its own, from the moment that every probe went through: the id of the process.

    A probe raises OSError or HTTPException while the server does not answer. With `log`, everything that the
    server prints goes into that file; without, its errors are seen and the rest is dropped. Raises SystemExit
    if the server does not start.
    """
    with _sink(log) as output:
        errors = None if log is None else subprocess.STDOUT
        process = subprocess.Popen(command, cwd=cwd, env=env, stdout=output, stderr=errors)
        try:
            for probe in probes:
                _wait_for(process, probe, patience_s, log)
            yield process.pid
        finally:
            _end(process)


@contextmanager
def _sink(log: Path | None) -> Generator[IO[bytes] | int]:
    if log is None:
        yield subprocess.DEVNULL
    else:
        with log.open("wb") as file:
            yield file


def _wait_for(
    process: subprocess.Popen[bytes], probe: Callable[[], object], patience_s: float, log: Path | None
) -> None:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"The server did not start. {_printed(log)}")
        try:
            probe()
        except (OSError, http.client.HTTPException):
            time.sleep(_PAUSE_S)
        else:
            return
    raise SystemExit(f"The server did not answer within {patience_s:.0f} seconds. {_printed(log)}")


def _printed(log: Path | None) -> str:
    return "" if log is None else f"It printed:\n{log.read_text(errors='replace')[-2000:]}"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
