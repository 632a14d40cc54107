"""Shared by the benchmarks: servers in processes of their own, and the line that names the machine."""

from __future__ import annotations

import http.client
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
_PAUSE_S = 0.1
_STOP_S = 15


def machine(*packages: str) -> str:
    """System, cores, versions of `packages` and BLAS, for the head of a table."""
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    blas = Path(os.environ["LD_PRELOAD"]).name if os.environ.get("LD_PRELOAD") else "bundled BLAS"
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {versions}, {blas}"


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
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/health")
    connection.getresponse().read()
    connection.close()
    return time.perf_counter() - began


def ask(port: int, path: str, body: object | None = None) -> Any:
    """POST, or GET without a body, and return the answer's JSON.

    Raises:
        OSError, http.client.HTTPException, ValueError: the server is dead, or dies while it answers.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        text = None if body is None else json.dumps(body)
        headers = {"Content-Type": "application/json"}
        connection.request("GET" if body is None else "POST", path, text, headers)
        return json.load(connection.getresponse())
    finally:
        connection.close()


@contextmanager
def running(
    command: Sequence[str], *probes: Callable[[], object], patience_s: float = 60, log: Path | None = None
) -> Generator[int]:
    """A server in a process of its own, from the moment that every probe went through: the id of the process.

    A probe raises OSError or HTTPException while the server does not answer. With `log`, everything that the
    server prints goes into that file; without, its errors are seen and the rest is dropped. Raises SystemExit
    if the server does not start.
    """
    with _sink(log) as output:
        errors = None if log is None else subprocess.STDOUT
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=errors)
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
