"""Time from a fresh clone to a served demo. Needs a package index."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from benchmarks import servers
from benchmarks.harness import ROOT, Part

HELLO = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}


class Copy:
    """A fresh clone of what git tracks, as it is now, with caches of its own."""

    def __init__(self, folder: Path) -> None:
        self._root, self._log = folder / "clone", folder / "log"
        self._root.mkdir(parents=True)
        self._copy_tracked()
        (self._root / ".env").unlink(missing_ok=True)
        self._ports = servers.free_port(), servers.free_port()
        caches = {"UV_CACHE_DIR": str(folder / "uv"), "PIP_CACHE_DIR": str(folder / "pip")}
        self._environment = {**os.environ, "PATH": "/usr/bin:/bin", **caches}
        ports = ("--mlx-port", str(self._ports[0]), "--proxy-port", str(self._ports[1]))
        python = shutil.which("python3") or sys.executable
        self._command = [python, "install_and_run.py", "--demo", *ports]

    def _copy_tracked(self) -> None:
        listed = subprocess.run(
            [shutil.which("git") or "git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).is_file():
                (self._root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self._root / name)

    def serve(self) -> float:
        """Start, have both ports reply, and end it. Returns the seconds until both have replied."""
        began, replies = time.perf_counter(), (partial(_reply, port) for port in self._ports)
        with servers.running(self._command, *replies, log=self._log, cwd=self._root, env=self._environment):
            return time.perf_counter() - began

    def interrupt(self, after_s: float) -> tuple[int, str]:
        """Start, and press Ctrl-C. Returns the status, and what was printed."""
        process = subprocess.Popen(
            self._command,
            cwd=self._root,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        with suppress(subprocess.TimeoutExpired):
            process.wait(after_s)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        printed = process.communicate(timeout=60)[0]
        return process.returncode, printed


def _reply(port: int) -> None:
    """Raises OSError while there is no reply."""
    try:
        servers.ask(port, "/v1/chat/completions", HELLO)["choices"]
    except (KeyError, ValueError) as error:
        raise OSError(error) from error


def clone(folder: Path, *, interruptions: int = 5, seed: int = 0) -> Iterator[str]:
    """Time from a fresh clone to a served demo, and the same after installations that were interrupted.

    What git tracks is copied into a folder of its own, whose installer sees no Python 3.12 and no uv on PATH
    and has empty caches of pip and uv. It installs and serves the demo model there until both ports answer.
    Then, in another copy, it is ended by Ctrl-C at random moments of the installation, each start going on
    with what the one before has left, and is started once more.
    """
    rng, copy = random.Random(seed), Copy(folder / "first")
    first_s = copy.serve()
    print(f"from a fresh clone to both ports: {first_s:.1f} s; the second start: {copy.serve():.1f} s")
    copy = Copy(folder / "second")
    for _ in range(interruptions):
        after_s = rng.uniform(0.3, 0.4 * first_s)  # the rest is the start of server and proxy
        status, printed = copy.interrupt(after_s)
        print(f"Ctrl-C after {after_s:.1f} s: status {status}")
        if status not in (0, 130) or "Traceback" in printed:
            yield f"status {status} after {after_s:.1f} s:\n{printed}"
    print(f"from there to both ports: {copy.serve():.1f} s")


PARTS: Mapping[str, Part] = {"clone": clone}
