"""Runs a command where there is no network but one port of 127.0.0.1. Linux only.

Run as a program inside of a new network namespace, it puts a listener on that port there, whose connections
go on through a Unix socket: the one way out. Whatever else the command tries to reach has no route, and the
kernel counts such tries. `Gate` is the other end of that socket.

    unshare ... python relay.py SOCKET PORT REPORT COMMAND...
"""

from __future__ import annotations

import fcntl
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

ALONE = ("unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1


def can_be_alone(environment: Mapping[str, str]) -> bool:
    """True if this machine lets us make such a namespace.

    Args:
        environment: of the command. A library that is preloaded and starts threads makes the kernel refuse.
    """
    with suppress(OSError):
        tried = subprocess.run([*ALONE, "true"], env=environment, capture_output=True, check=False)
        return tried.returncode == 0
    return False


class Gate:
    """Passes what comes through a Unix socket to a port of this machine."""

    def __init__(self, path: Path, port: int) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        relay(self._listener, lambda: socket.create_connection(("127.0.0.1", port)))

    def close(self) -> None:
        self._listener.close()


def relay(listener: socket.socket, connect: Callable[[], socket.socket]) -> None:
    """Join every connection that comes with one that goes out, in the background.

    Where nobody answers, the one that came is closed.
    """

    def accept() -> None:
        with suppress(OSError):
            while True:
                inner, _ = listener.accept()
                _join(inner, connect)

    threading.Thread(target=accept, daemon=True).start()


def _join(inner: socket.socket, connect: Callable[[], socket.socket]) -> None:
    try:
        outer = connect()
    except OSError:
        inner.close()
        return
    for source, sink in ((inner, outer), (outer, inner)):
        threading.Thread(target=_pump, args=(source, sink), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _bring_up_loopback() -> None:
    with socket.socket() as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        _, flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, _GET_FLAGS, request))
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", flags | _UP))


def _tries() -> int:
    """How often this namespace looked for a way to an address and there was none."""
    names, values = [
        row.split() for row in Path("/proc/net/snmp").read_text().splitlines() if row[:3] == "Ip:"
    ]
    newer = dict(row.split() for row in Path("/proc/net/snmp6").read_text().splitlines())
    return int(dict(zip(names, values, strict=True))["OutNoRoutes"]) + int(newer["Ip6OutNoRoutes"])


def main(gate: str, port: str, report: str, *command: str) -> int:
    def through_the_gate() -> socket.socket:
        outer = socket.socket(socket.AF_UNIX)
        outer.connect(gate)
        return outer

    _bring_up_loopback()
    relay(socket.create_server(("127.0.0.1", int(port)), backlog=64), through_the_gate)
    before = _tries()
    status = subprocess.call(command)
    Path(report).write_text(str(_tries() - before))
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
