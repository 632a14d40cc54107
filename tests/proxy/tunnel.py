"""A wire between the proxy and the server that keeps a copy of what the proxy sends."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Heard:
    """One request as it reached the server."""

    line: str
    headers: dict[str, str]
    body: Any


class Tunnel:
    """Passes bytes both ways; when one end closes, so does the other."""

    def __init__(self, backend_port: int) -> None:
        self._backend_port = backend_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._copies: list[bytearray] = []
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def lead_to(self, backend_port: int) -> None:
        """Pass what comes from now on to another server; what was open is hung up."""
        if backend_port == self._backend_port:
            return
        self._backend_port = backend_port
        for end in self._sockets:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._sockets.clear()

    def clear(self) -> None:
        for copy in self._copies:
            copy.clear()

    def heard(self, path: str) -> list[Heard]:
        """The requests for `path` since the last `clear`."""
        requests = [request for copy in list(self._copies) for request in _parse(bytes(copy))]
        return [request for request in requests if request.line.split()[1].partition("?")[0] == path]

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                copy = bytearray()
                self._copies.append(copy)
                server = socket.create_connection(("127.0.0.1", self._backend_port))
                self._sockets += (client, server)
                for source, sink, record in ((client, server, copy), (server, client, None)):
                    threading.Thread(target=_pump, args=(source, sink, record), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket, copy: bytearray | None) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            if copy is not None:
                copy += data
            sink.sendall(data)
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _parse(data: bytes) -> list[Heard]:
    requests: list[Heard] = []
    while b"\r\n\r\n" in data:
        head, _, data = data.partition(b"\r\n\r\n")
        line, *rows = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (row.partition(":") for row in rows)}
        length = int(headers.get("content-length", 0))
        body, data = data[:length], data[length:]
        requests.append(Heard(line, headers, json.loads(body) if body else None))
    return requests
