"""Find the process that listens on a port, and recognise a proxy that an earlier server left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from start_llm.access.loopback import bound_socket, loopback_addresses
from start_llm.storage.private_files import private_folder, private_opener

_GONE_WITHIN_S = 8.0
_PATIENCE_S = 10.0
_LISTENING = "0A"


@dataclass(frozen=True, slots=True)
class Process:
    """A process. Its start time tells it apart from a later process with the same number."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """Return the process with this number, or None."""
        started = _output("ps", "-o", "lstart=", "-p", str(pid))
        return cls(pid, started) if started else None

    @property
    def is_running(self) -> bool:
        return Process.of(self.pid) == self

    @property
    def command(self) -> str:
        return _output("ps", "-o", "args=", "-p", str(self.pid))[:120] or "unknown"

    def end(self) -> None:
        """Send SIGTERM and wait up to 8 s, then send SIGKILL and wait up to 2 s."""
        for number, patience_s in ((signal.SIGTERM, _GONE_WITHIN_S), (signal.SIGKILL, 2.0)):
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)
            deadline = time.monotonic() + patience_s
            while self.is_running and time.monotonic() < deadline:
                time.sleep(0.1)


class ProcessRecord:
    """A file that names the running proxy of this checkout, so that a later start recognises a stale one."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, process: Process) -> None:
        private_folder(self._path.parent)
        with open(self._path, "w", opener=private_opener) as file:
            json.dump({"pid": process.pid, "started": process.started}, file)

    def read(self) -> Process | None:
        try:
            match json.loads(self._path.read_bytes()):
                case {"pid": int(pid), "started": str(started)}:
                    return Process(pid, started)
                case _:
                    pass
        except (OSError, ValueError, RecursionError):
            # There is no record, or a damaged one. No process then counts as ours.
            pass
        return None

    def forget(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def is_free(port: int) -> bool:
    """Return True if a server could listen on this port of loopback."""
    try:
        for address in loopback_addresses():
            bound_socket(address, port).close()
    except OSError:
        return False
    return True


def is_connected(port: int, to: int) -> bool:
    """Return True if another process has an end of a connection between these two ports of this machine.

    Args:
        port: of that end.
        to: of the other end.
    """
    if Path("/proc/net/tcp").exists():
        return any(_ends(columns, port, to) for columns in _sockets())
    return bool({*_output("lsof", "-nP", f"-iTCP:{port}", "-t").split()} - {str(os.getpid())})


def _ends(columns: list[str], port: int, to: int) -> bool:
    """Return True for the row of a socket with these ports that a process has. Inode 0: no process has it."""
    return [_port(columns[1]), _port(columns[2])] == [port, to] and columns[9] != "0"


def owner(port: int) -> Process | None:
    """Return the process that listens on a port; None if there is none or the system does not show it."""
    pid = _owner_from_proc(port) if Path("/proc/net/tcp").exists() else _owner_from_lsof(port)
    return None if pid is None else Process.of(pid)


def _owner_from_proc(port: int) -> int | None:
    inodes = set(_listening_inodes(port))
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            match = re.fullmatch(r"socket:\[(\d+)\]", str(link.readlink()))
            if match and match[1] in inodes:
                return int(link.parts[2])
    return None


def _listening_inodes(port: int) -> list[str]:
    return [row[9] for row in _sockets() if row[3] == _LISTENING and _port(row[1]) == port]


def _sockets() -> Iterator[list[str]]:
    """Yield the columns of the kernel's tables: 1 and 2 have the addresses, 3 the state, 9 the inode."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            yield from (line.split() for line in Path(table).read_text().splitlines()[1:])


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def _owner_from_lsof(port: int) -> int | None:
    pids = _output("lsof", "-nP", f"-iTCP:{port}", "-sTCP:LISTEN", "-t").split()
    return int(pids[0]) if pids else None


def user_of(pid: int) -> str:
    """Return the user of a process."""
    return _output("ps", "-o", "user=", "-p", str(pid)) or "another user"


def _output(*command: str) -> str:
    """Return the output of a system tool; empty if it is missing, finds nothing or takes over 10 s."""
    try:
        ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_PATIENCE_S)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout.strip()
