"""Real launches of several ranks on this machine, and their processes."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = Path(sys.executable).with_name("mlx.launch")
_PORTS = range(20_000, 32_000)
_given: set[int] = set()


@dataclass
class Launched:
    """A launch, and what its ranks print."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append(line)

    def rank(self, number: int) -> int:
        """The process of a rank."""
        for pid in descendants(self.process.pid):
            with suppress(OSError):
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if f"MLX_RANK={number}".encode() in environment:
                    return pid
        raise AssertionError(f"there is no rank {number}:\n{self.text}")

    def wait(self, seconds: float) -> int:
        """Its status, when all of its processes have ended."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it still runs after {seconds} s:\n{self.text}") from None


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have."""
    pids: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                pids += [child, *descendants(child)]
    return pids


def runs(pid: int) -> bool:
    """Whether a process runs. One that has ended may wait for the system to notice."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@contextmanager
def launched(words: Sequence[str], **variables: str) -> Generator[Launched]:
    """A command, whose processes have all ended afterwards."""
    temporary = tempfile.TemporaryDirectory(prefix="start_llm-ranks-")  # mlx.launch leaves files
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": temporary.name, **variables},
        stdin=subprocess.PIPE,  # mlx.launch spins where there is none
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    launch = Launched(process)
    reader = threading.Thread(target=launch.read, daemon=True)
    reader.start()
    try:
        yield launch
    finally:
        left = [process.pid, *descendants(process.pid)]
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(10)
        reader.join(5)
        for pipe in (process.stdin, process.stdout):
            if pipe:
                pipe.close()
        temporary.cleanup()


def ranks(count: int, program: Sequence[str]) -> list[str]:
    """The command that runs a program as several ranks."""
    port = str(free_ports(count))
    return [
        *(str(LAUNCH), "-n", str(count), "--backend", "ring", "--starting-port", port, "--"),
        *(sys.executable, *program),
    ]


def free_ports(count: int) -> int:
    """The first of so many free ports in a row, of which none was given out before.

    They are below those that systems give to connections, one of which may come in between.
    """
    while True:
        first = random.randrange(_PORTS.start, _PORTS.stop - count)
        ports = range(first, first + count)
        if _given.isdisjoint(ports) and all(map(_can_be_bound, ports)):
            _given.update(ports)
            return first


def is_free(port: int) -> bool:
    """Whether nobody listens there."""
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) != 0


def _can_be_bound(port: int) -> bool:
    with suppress(OSError), socket.socket() as tried:
        tried.bind(("127.0.0.1", port))
        return True
    return False


def until(condition: Callable[[], object], seconds: float, what: str, launch: Launched | None = None) -> None:
    """Wait until `condition()` holds. If it does not, the error has what a launch has printed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s: {what}\n{launch.text if launch else ''}")
