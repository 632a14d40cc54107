"""Time from a fresh clone to a served demo. Needs a package index."""

from __future__ import annotations

import http.client
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks import servers
from benchmarks.harness import ROOT, Part

PATIENCE_S = 600
HELLO = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}


class Served(NamedTuple):
    """A start: seconds until both ports replied, and the lines printed."""

    seconds: float
    lines: list[str]


class Copy:
    """A fresh clone of what git tracks, as it is now, with caches of its own."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "clone"
        self.root.mkdir(parents=True)
        self._copy_tracked()
        (self.root / ".env").unlink(missing_ok=True)
        self.port, self.proxy_port = servers.free_port(), servers.free_port()
        caches = {"UV_CACHE_DIR": str(folder / "uv"), "PIP_CACHE_DIR": str(folder / "pip")}
        self.environment = {**os.environ, "PATH": "/usr/bin:/bin", **caches}
        self.command = [shutil.which("python3") or sys.executable, "install_and_run.py"]

    def _copy_tracked(self) -> None:
        for name in filter(None, git("ls-files", "-z").decode().split("\0")):
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)

    def start(self) -> subprocess.Popen[str]:
        """The one command, with the Python of the system."""
        ports = ["--mlx-port", str(self.port), "--proxy-port", str(self.proxy_port)]
        return subprocess.Popen(
            [*self.command, "--demo", *ports],
            cwd=self.root,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def serve(self) -> Served:
        """Start, have both ports reply, and end it."""
        began, process = time.perf_counter(), self.start()
        try:
            for port in (self.port, self.proxy_port):
                self._wait_for(port, process)
                servers.ask(port, "/v1/chat/completions", HELLO)["choices"]
            seconds = time.perf_counter() - began
        finally:
            end(process)
        return Served(seconds, process.communicate()[0].splitlines())

    def _wait_for(self, port: int, process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise SystemExit(f"It ended with {process.returncode}:\n{process.communicate()[0]}")
            try:
                servers.ask(port, "/v1/models")
            except (OSError, http.client.HTTPException, ValueError):
                time.sleep(0.1)
            else:
                return
        raise SystemExit(f"Nothing answers on port {port}.")

    def interrupt(self, after_s: float) -> tuple[int, str]:
        """Start, and press Ctrl-C. Returns the status, and what was printed."""
        process = self.start()
        try:
            process.wait(after_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
        printed = process.communicate(timeout=60)[0]
        return process.returncode, printed


def git(*words: str) -> bytes:
    """Return what git prints here."""
    return subprocess.run(
        [shutil.which("git") or "git", *words], cwd=ROOT, capture_output=True, check=True
    ).stdout


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def clone(folder: Path, *, interruptions: int = 5, seed: int = 0) -> Iterator[str]:
    """Time from a fresh clone to a served demo, and the same after installations that were interrupted.

    What git tracks is copied into a folder of its own, whose installer sees no Python 3.12 and no uv on PATH
    and has empty caches of pip and uv. It installs and serves the demo model there until both ports answer.
    Then, in another copy, it is ended by Ctrl-C at random moments of the installation, each start going on
    with what the one before has left, and is started once more.
    """
    rng, copy = random.Random(seed), Copy(folder / "first")
    first_s, lines = copy.serve()
    print("\n".join(lines[:5]))
    second_s = copy.serve().seconds
    print(f"from a fresh clone to both ports: {first_s:.1f} s; the second start: {second_s:.1f} s")
    copy = Copy(folder / "second")
    for _ in range(interruptions):
        after_s = rng.uniform(0.3, 0.4 * first_s)  # the rest is the start of server and proxy
        status, printed = copy.interrupt(after_s)
        print(f"Ctrl-C after {after_s:.1f} s: status {status}")
        if status not in (0, 130) or "Traceback" in printed:
            yield f"status {status} after {after_s:.1f} s:\n{printed}"
    print(f"from there to both ports: {copy.serve().seconds:.1f} s")


PARTS: Mapping[str, Part] = {"clone": clone}
