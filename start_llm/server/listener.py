"""Listens for connections and limits their number."""

from __future__ import annotations

import errno
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from start_llm.access.access_policy import AccessPolicy
from start_llm.access.key_limits import KeyLimits
from start_llm.access.loopback import IPV4_LOOPBACK, IPV6_LOOPBACK, loopback_addresses
from start_llm.access.request_tenant import Tenants
from start_llm.core.client_presence import LOOK_S, check_client
from start_llm.core.errors import ClientGone, PortError
from start_llm.core.limits import ServerLimits
from start_llm.core.standard_error import print_traceback
from start_llm.core.thread_owners import REQUEST, take_role
from start_llm.protocols.notices import Notices
from start_llm.protocols.response_store import ResponseStore
from start_llm.protocols.seal import Seal
from start_llm.server.activity_pages import ActivityPages, ServingMachine
from start_llm.server.adapter_pages import AdapterPages
from start_llm.server.drain import RequestDrain
from start_llm.server.library_pages import LibraryPages
from start_llm.server.served_models import ServedModels
from start_llm.telemetry.activity import Activity, Refusal
from start_llm.telemetry.prometheus import ServerMetrics

_BUSY: Final = float("inf")
_POLL_S: Final = 0.1
_ANOTHER_SERVER: Final = " Another server may be running there; choose another port with --mlx-port."
_NO_ROOM = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 2\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\nConnection: close\r\n\r\n%b"
)
_NO_ROOM_BODY = (
    b'{"error":{"message":"Too many connections are busy; try again in a moment.",'
    b'"type":"overloaded_error","param":null,"code":null}}'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerContext:
    """Everything that handlers need to answer requests.

    Attributes:
        show_refusal: prints a refused request.
        adapter_root: see `server.adapter_pages.AdapterPages`.
    """

    models: ServedModels
    library: LibraryPages
    seal: Seal
    tenants: Tenants = field(default_factory=Tenants)
    responses: ResponseStore = field(default_factory=ResponseStore)
    notices: Notices = field(default_factory=Notices)
    access_policy: AccessPolicy = field(default_factory=AccessPolicy)
    drain: RequestDrain = field(default_factory=RequestDrain)
    key_limits: KeyLimits = field(default_factory=KeyLimits)
    adapter_root: Path | None = None
    prometheus: ServerMetrics = field(default_factory=ServerMetrics)
    activity: Activity = field(default_factory=Activity)
    show_refusal: Callable[[Refusal], None] = lambda _: None
    machine: ServingMachine = field(default_factory=ServingMachine)

    @property
    def adapters(self) -> AdapterPages:
        return AdapterPages(self.models, self.adapter_root)

    @property
    def activity_pages(self) -> ActivityPages:
        return ActivityPages(self.models, self.activity, self.machine, bool(self.access_policy.keys))


class Connections:
    """Open sockets, and since when each has no whole request. Thread-safe.

    A request that is half sent is none yet: who does not end it must not keep others out.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting_since: dict[socket.socket, float] = {}
        self._lock = threading.Lock()

    def admit(self, connection: socket.socket) -> bool:
        """Make room for a new socket. Return False if every open one has a request that is being answered."""
        with self._lock:
            if len(self._waiting_since) >= self._most and not self._close_longest_waiting():
                return False
            self._waiting_since[connection] = time.monotonic()
            return True

    def forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._waiting_since.pop(connection, None)

    @contextmanager
    def busy(self, connection: socket.socket) -> Generator[None]:
        """Mark a connection as busy while the block runs, so that it is not closed to make room."""
        self._mark(connection, _BUSY)
        try:
            yield
        finally:
            self.receives(connection)

    @contextmanager
    def not_busy(self, connection: socket.socket) -> Generator[None]:
        """Let a busy connection be closed to make room while the block waits for the rest of its request."""
        self.receives(connection)
        try:
            yield
        finally:
            self._mark(connection, _BUSY)

    def receives(self, connection: socket.socket) -> None:
        """Note that a connection waits for a request, or for the rest of one, from now on."""
        self._mark(connection, time.monotonic())

    def close_all(self) -> None:
        """Close every connection."""
        with self._lock:
            for connection in self._waiting_since:
                _hang_up(connection)

    def _mark(self, connection: socket.socket, waiting_since: float) -> None:
        with self._lock:
            if connection in self._waiting_since:
                self._waiting_since[connection] = waiting_since

    def _close_longest_waiting(self) -> bool:
        connection, since = min(self._waiting_since.items(), key=lambda item: item[1])
        if since == _BUSY:
            return False
        # Its thread returns from the read, finds the end of the stream and closes the socket.
        _hang_up(connection)
        del self._waiting_since[connection]
        return True


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _IPv6Listener(socketserver.TCPServer):
    """Accepts connections on the other loopback address, and hands them to its listener.

    Some clients try only the first address of `localhost`, which is this one where the system has IPv6.
    """

    address_family = socket.AF_INET6
    allow_reuse_address = True

    def __init__(self, listener: Listener) -> None:
        self.request_queue_size = listener.request_queue_size
        self.verify_request = listener.verify_request
        self.process_request = listener.process_request
        self.shutdown_request = listener.shutdown_request
        self.handle_error = listener.handle_error
        super().__init__((IPV6_LOOPBACK, listener.port), socketserver.BaseRequestHandler)


class Listener(ThreadingHTTPServer):
    """Accepts connections, with one thread each. On loopback, at both addresses.

    The constructor binds the port, so that a busy port is found before a model is loaded. From `begin` on
    `/health` is answered, with `starting`; all other requests wait for `open`.
    """

    request_queue_size = 128
    daemon_threads = True
    block_on_close = False

    def __init__(
        self, host: str, port: int, handler: type[BaseHTTPRequestHandler], limits: ServerLimits
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.limits = limits
        self.connections = Connections(limits.max_connections)
        self.access_policy = AccessPolicy()
        self._context: ServerContext | None = None
        self._is_decided = threading.Event()
        self._accepts = False
        self._ipv6_listener: _IPv6Listener | None = None
        try:
            super().__init__((host, port), handler)
            self._ipv6_listener = self._listen_on_ipv6(host, port)
        except OSError as error:
            if hasattr(self, "socket"):  # the system may have none of this address family
                self.server_close()
            advice = _ANOTHER_SERVER if error.errno == errno.EADDRINUSE else ""
            raise PortError(
                f"MLX_HOST={host} MLX_PORT={port} cannot be listened on: {error.strerror}.{advice}"
            ) from error

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def _listen_on_ipv6(self, host: str, port: int) -> _IPv6Listener | None:
        """Also listen on the IPv6 loopback address, if this listener is on the other one.

        Raises:
            OSError: another server has the port there, and clients would find that one.
        """
        if host not in (IPV4_LOOPBACK, "localhost") or IPV6_LOOPBACK not in loopback_addresses():
            return None
        try:
            return _IPv6Listener(self)
        except OSError:
            if port:
                raise
            return None  # the system chose a port that is free at the first address

    @property
    def _servers(self) -> tuple[socketserver.TCPServer, ...]:
        return (self, self._ipv6_listener) if self._ipv6_listener else (self,)

    @property
    def is_starting(self) -> bool:
        return self._context is None

    @property
    def context(self) -> ServerContext:
        """What requests are answered with. Waits for `open`, and looks for the client meanwhile.

        Raises:
            ClientGone: the client has left, or the server is stopped before it has opened.
        """
        while not self._is_decided.wait(LOOK_S):
            check_client()
        if self._context is None:
            raise ClientGone("the server has stopped before it was ready")
        return self._context

    def begin(self, policy: AccessPolicy) -> None:
        """Start accepting connections on a separate thread."""
        self.access_policy, self._accepts = policy, True
        for server in self._servers:
            accept = threading.Thread(target=server.serve_forever, args=(_POLL_S,), name="listener")
            accept.daemon = True
            accept.start()

    def open(self, context: ServerContext) -> None:
        """Answer requests from now on."""
        self._context = context
        self._is_decided.set()
        if not self._accepts:
            self.begin(context.access_policy)

    def stop_accepting(self) -> None:
        """Accept no more connections. Open ones continue, if there is something to answer them with."""
        self._is_decided.set()
        for server in self._servers:
            if self._accepts:
                with suppress(OSError):  # macOS refuses; then its thread sees its end at the next poll
                    server.socket.shutdown(socket.SHUT_RDWR)
                server.shutdown()
            server.server_close()

    def server_bind(self) -> None:
        # HTTPServer's own method resolves the host name, which can block.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.port

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002
        if self.connections.admit(request):
            return True
        with suppress(OSError):
            request.setblocking(False)
            request.send(_NO_ROOM % (len(_NO_ROOM_BODY), _NO_ROOM_BODY))
        return False

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        take_role(REQUEST)
        super().process_request_thread(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.forget(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        if not isinstance(sys.exception(), ConnectionError):
            print_traceback()
