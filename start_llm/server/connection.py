"""Reads from and writes to one client's socket, with deadlines."""

import io
import select
import socket
import time
from collections.abc import Buffer

from start_llm.core.errors import ClientGone

_DRAIN_BYTES = 65536
_DRAIN_S = 2.0
_CLOSED = getattr(select, "POLLRDHUP", 0)


class DeadlineReader(io.RawIOBase):
    """Reads from a socket up to a deadline, even if bytes arrive one by one.

    Attributes:
        has_ended: a read has met the end of what the client sends.

    Raises:
        TimeoutError: from a read, once the deadline has passed.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._deadline = float("inf")
        self.has_ended = False

    def allow(self, seconds: float) -> None:
        """Set the deadline for all following reads to `seconds` from now."""
        self._deadline = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("the client sent too slowly")
        self._connection.settimeout(remaining)
        count = self._connection.recv_into(buffer)
        self.has_ended = not count
        return count


class BoundedWriter(io.RawIOBase):
    """Writes to a socket.

    Raises:
        ClientGone: the client closed the connection, or read nothing for `patience_s` seconds.
    """

    def __init__(self, connection: socket.socket, patience_s: float) -> None:
        self._connection = connection
        self._patience_s = patience_s

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer, /) -> int:
        unsent = memoryview(data)
        try:
            # A socket with a timeout is polled before each send, and setting a timeout is a system call.
            if self._connection.gettimeout() != 0:
                self._connection.setblocking(False)
            while unsent:
                unsent = unsent[self._send_some(unsent) :]
        except OSError as error:
            raise ClientGone(str(error)) from error
        return len(memoryview(data))

    def _send_some(self, data: memoryview) -> int:
        """Send some bytes and return their number. If the buffer is full, wait for room and return 0.

        The timeout applies to each wait, not to all of the data. Otherwise a slow client would fail.
        """
        try:
            return self._connection.send(data)
        except BlockingIOError:
            poller = select.poll()
            poller.register(self._connection, select.POLLOUT)
            if not poller.poll(1000 * self._patience_s):
                raise TimeoutError("the client reads nothing") from None
            return 0


def is_closed_by_peer(connection: socket.socket) -> bool:
    """Return True if the client has closed the connection, or has shut its sending side.

    Never waits and consumes no bytes.

    Of a connection with unread bytes only the events tell: Linux's own one, and `POLLHUP` on macOS.
    """
    poller = select.poll()
    poller.register(connection, select.POLLIN | _CLOSED)
    try:
        return any(
            events & (_CLOSED | select.POLLHUP) or not connection.recv(1, socket.MSG_PEEK)
            for _, events in poller.poll(0)
        )
    except OSError:
        return True


def drain(connection: socket.socket) -> None:
    """Read and discard the client's remaining bytes, for at most 2 seconds.

    Closing a socket with unread bytes makes the kernel reset the connection, so the client would lose the
    reply.
    """
    deadline = time.monotonic() + _DRAIN_S
    try:
        connection.shutdown(socket.SHUT_WR)
        while (remaining := deadline - time.monotonic()) > 0:
            connection.settimeout(remaining)
            if not connection.recv(_DRAIN_BYTES):
                return
    except OSError:
        # The client is gone, or never stops sending. Nothing more can be done.
        return
