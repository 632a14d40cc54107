"""Fetches an image from a public web server (IMAGE_URLS): no redirects, and limits of time and size."""

import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from start_llm.images.addresses import ImageAddress, Resolve, is_public, parse_address, resolve
from start_llm.images.problems import could_not_fetch, has_too_many_bytes, is_bad_address

PATIENCE_S = 10.0
_HEADERS = {
    "User-Agent": "start_llm",
    "Accept": "image/*",
    "Accept-Encoding": "identity",
    "Connection": "close",
}
_PIECE = 65536
_TOO_LATE = f"it took more than {PATIENCE_S:g} seconds"

type Connect = Callable[[str, int, float], socket.socket]
"""Connects to an address and a port, within a time in seconds. Raises OSError."""


def _connect(address: str, port: int, timeout_s: float) -> socket.socket:
    return socket.create_connection((address, port), timeout=timeout_s)


class ImageFetcher:
    """Fetches images. Safe to use from any thread."""

    def __init__(
        self,
        max_bytes: int,
        *,
        resolve: Resolve = resolve,
        connect: Connect = _connect,
    ) -> None:
        self._max_bytes = max_bytes
        self._resolve = resolve
        self._connect = connect

    def fetch(self, url: str, deadline: float) -> bytes:
        """Return what is at a URL.

        Args:
            deadline: on the clock of `time.monotonic`; for name, connection, headers and body together.

        Raises:
            ImageProblem: the URL is refused, or the server does not answer as it has to.
        """
        place = parse_address(url)
        addresses = self._public_addresses(place, deadline)
        with self._connected(addresses, place, deadline) as connected, connected.dup() as handle:
            # A server that sends a byte now and then passes every timeout of a single read.
            watch = threading.Timer(max(deadline - time.monotonic(), 0), _hang_up, [handle])
            watch.daemon = True
            watch.start()
            try:
                data = self._answer(place, connected)
            except (OSError, http.client.HTTPException, ValueError) as error:
                is_late = time.monotonic() >= deadline
                raise could_not_fetch(_TOO_LATE if is_late else _reason(error)) from error
            finally:
                watch.cancel()
        if time.monotonic() >= deadline:
            raise could_not_fetch(_TOO_LATE)
        return data

    def _public_addresses(self, place: ImageAddress, deadline: float) -> Sequence[str]:
        """Resolve the host once, in a thread of its own: the system's resolver has no time limit."""
        results: list[Sequence[str] | OSError] = []

        def ask() -> None:
            try:
                results.append(self._resolve(place.host, place.port))
            except OSError as error:
                results.append(error)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(max(deadline - time.monotonic(), 0))
        if not results:
            raise could_not_fetch(_TOO_LATE)
        if isinstance(results[0], OSError) or not results[0]:
            raise could_not_fetch(f"{place.host} is not known")
        if not all(map(is_public, results[0])):
            raise is_bad_address(f"{place.host} is not a public address")
        return results[0]

    def _connected(self, addresses: Sequence[str], place: ImageAddress, deadline: float) -> socket.socket:
        """Connect to the first of the addresses that answers."""
        for address in addresses:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise could_not_fetch(_TOO_LATE)
            with suppress(OSError):
                return self._connect(address, place.port, remaining_s)
        raise could_not_fetch("no server answers there")

    def _answer(self, place: ImageAddress, connected: socket.socket) -> bytes:
        """Ask for the image on an open connection and read it.

        Raises:
            ImageProblem, OSError, http.client.HTTPException, ValueError
        """
        asking = http.client.HTTPConnection(place.host, place.port)
        asking.sock = _secured(connected, place.host) if place.is_secure else connected
        asking.default_port = 443 if place.is_secure else 80
        try:
            return self._read(asking, place)
        finally:
            asking.close()

    def _read(self, asking: http.client.HTTPConnection, place: ImageAddress) -> bytes:
        asking.request("GET", place.target, headers=_HEADERS)
        reply = asking.getresponse()
        if reply.status != 200:
            hint = " Redirects are not followed." if 300 <= reply.status < 400 else ""
            raise could_not_fetch(f"the server answered with status {reply.status}.{hint}".rstrip("."))
        length = reply.length
        if length is not None and length > self._max_bytes:
            raise has_too_many_bytes(length, self._max_bytes)
        return self._body(reply)

    def _body(self, reply: http.client.HTTPResponse) -> bytes:
        pieces, count = list[bytes](), 0
        while piece := reply.read1(_PIECE):
            pieces.append(piece)
            count += len(piece)
            if count > self._max_bytes:
                raise has_too_many_bytes(count, self._max_bytes)
        if reply.length:
            raise http.client.IncompleteRead(b"", reply.length)
        return b"".join(pieces)


def _secured(connected: socket.socket, host: str) -> socket.socket:
    return ssl.create_default_context().wrap_socket(connected, server_hostname=host.rstrip("."))


def _hang_up(connected: socket.socket) -> None:
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def _reason(error: Exception) -> str:
    return f"the connection failed ({type(error).__name__})"
