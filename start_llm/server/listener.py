"""The listening socket, and how many clients may hold one."""

from __future__ import annotations

import socket
import socketserver
import sys
import threading
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from start_llm.core.door import Door
from start_llm.core.errors import PortError
from start_llm.protocols.base import ModelFacts
from start_llm.protocols.notices import Notices
from start_llm.protocols.response_store import ResponseStore
from start_llm.protocols.seal import Seal
from start_llm.protocols.tenants import Tenants
from start_llm.server.leaving import Leaving
from start_llm.server.status import Status
from start_llm.service import Service

_BUSY: Final = float("inf")
_POLL_S: Final = 0.1
_NO_ROOM = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 2\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\nConnection: close\r\n\r\n%b"
)
_NO_ROOM_BODY = (
    b'{"error":{"message":"Too many connections are busy; try again in a moment.",'
    b'"type":"overloaded_error","param":null,"code":null}}'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What one client may take of the server.

    Attributes:
        most_connections: open sockets; beyond it the longest idle one is closed.
        most_body_bytes: length of a request body.
        idle_s: silence between two requests. Longer than proxies pool connections, up to 120 s.
        header_s, body_s: time to send all headers, and then the whole body.
        write_s: time for which a client may read nothing.
        keep_alive_s: silence in a stream after which an empty data event is sent.
    """

    most_connections: int = 512
    most_body_bytes: int = 64 * 2**20
    idle_s: float = 130
    header_s: float = 10
    body_s: float = 60
    write_s: float = 30
    keep_alive_s: float = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Everything that handlers answer from."""

    service: Service
    status: Status
    model: ModelFacts
    seal: Seal
    tenants: Tenants = field(default_factory=Tenants)
    responses: ResponseStore = field(default_factory=ResponseStore)
    notices: Notices = field(default_factory=Notices)
    door: Door = field(default_factory=Door)
    leaving: Leaving = field(default_factory=Leaving)


class Connections:
    """Open sockets and since when each is idle. Safe to use from any thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._idle_since: dict[socket.socket, float] = {}
        self._lock = threading.Lock()

    def admit(self, connection: socket.socket) -> bool:
        """Make room for a new socket. False if every open one is in the middle of a request."""
        with self._lock:
            if len(self._idle_since) >= self._most and not self._close_longest_idle():
                return False
            self._idle_since[connection] = time.monotonic()
            return True

    def forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._idle_since.pop(connection, None)

    @contextmanager
    def busy(self, connection: socket.socket) -> Generator[None]:
        """The connection is in the middle of a request, and is not closed to make room."""
        self._mark(connection, _BUSY)
        try:
            yield
        finally:
            self._mark(connection, time.monotonic())

    def close_all(self) -> None:
        with self._lock:
            for connection in self._idle_since:
                _hang_up(connection)

    def _mark(self, connection: socket.socket, idle_since: float) -> None:
        with self._lock:
            if connection in self._idle_since:
                self._idle_since[connection] = idle_since

    def _close_longest_idle(self) -> bool:
        connection, since = min(self._idle_since.items(), key=lambda item: item[1])
        if since == _BUSY:
            return False
        # Its thread wakes up from reading, finds the end, and closes it.
        _hang_up(connection)
        del self._idle_since[connection]
        return True


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class Listener(ThreadingHTTPServer):
    """Accepts connections, one thread each.

    Bound when it is made, so that a busy port is found before a model is loaded; serves once it has a site.
    """

    request_queue_size = 128
    daemon_threads = True
    block_on_close = False

    def __init__(
        self, host: str, port: int, handler: type[BaseHTTPRequestHandler], limits: ServerLimits
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.limits = limits
        self.connections = Connections(limits.most_connections)
        self._site: Site | None = None
        try:
            super().__init__((host, port), handler)
        except OSError as error:
            raise PortError(
                f"MLX_HOST={host} MLX_PORT={port} cannot be listened on: {error.strerror}. "
                "Another server may be running there; choose another with --mlx-port."
            ) from error

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def site(self) -> Site:
        if self._site is None:
            raise RuntimeError("requests are accepted only once there is a site")
        return self._site

    def open(self, site: Site) -> None:
        """Begin to accept, on a thread of its own."""
        self._site = site
        threading.Thread(target=self.serve_forever, args=(_POLL_S,), name="listener", daemon=True).start()

    def stop_accepting(self) -> None:
        """Take no new connections; those that are open go on."""
        if self._site is not None:
            self.shutdown()
        self.server_close()

    def hang_up(self) -> None:
        """Close every connection."""
        self.connections.close_all()

    def server_bind(self) -> None:
        # Not HTTPServer's own, which asks the name service for the host and can wait for it.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.port

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002
        if self.connections.admit(request):
            return True
        with suppress(OSError):
            request.setblocking(False)
            request.send(_NO_ROOM % (len(_NO_ROOM_BODY), _NO_ROOM_BODY))
        return False

    def shutdown_request(self, request: Any) -> None:
        self.connections.forget(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        if not isinstance(sys.exception(), ConnectionError):
            traceback.print_exc()
