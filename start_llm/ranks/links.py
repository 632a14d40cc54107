"""TCP connections between rank 0 and its followers, over which messages go (`ranks.wire`).

Rank 0 listens at its own address among the ranks until all followers are there, and never again. Whoever
connects has to know a secret that is new at each start and goes through the ranks' own connection. What
crosses is not encrypted; docs/SECURITY.md says what that is.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import time
from contextlib import ExitStack, suppress
from typing import NamedTuple

from start_llm.core.errors import RanksApart, StartupError
from start_llm.core.silent_peers import end_when_silent
from start_llm.ranks.wire import Message, decoded, encoded

_LENGTH = struct.Struct(">I")
_MOST_BYTES = 2**28
_WORD_BYTES = 32
_NUMBER_BYTES = 2
PLACE = struct.Struct(f"<H{_WORD_BYTES}s")
"""A `MeetingPlace` as the ranks' own connection carries it."""
_GREETING_S = 5.0
"""Seconds for which whoever connects may take to prove that it knows the secret."""
_TURN_S = 60.0
"""Seconds for which a follower waits for rank 0, which greets whoever connects one after the other."""
_SILENCE_S = 5
"""Seconds without a sign of life after which a connection is given up: a machine may lose its power."""


class LinkClosed(Exception):
    """The other end is gone, or sends what is no message."""


class MeetingPlace(NamedTuple):
    """Where followers find rank 0, and how they prove who they are.

    Attributes:
        port: at the address of rank 0.
        secret: 32 bytes.
    """

    port: int
    secret: bytes


class Link:
    """A connection to another rank, over which both ends send messages.

    Args:
        connection: both ends have proven that they know the secret.

    Attributes:
        rank: the other end's.
        address: the other end's.
    """

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self._connection = connection
        self._connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end_when_silent(connection, _SILENCE_S)
        self._incoming = connection.makefile("rb")
        self.rank = rank
        self.address = str(connection.getpeername()[0])

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            LinkClosed: the other end is gone.
        """
        data = encoded(message)
        try:
            self._connection.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise LinkClosed(str(error)) from error

    def receive(self) -> Message:
        """Wait for the next message.

        Raises:
            LinkClosed: the other end is gone, or has sent what is no message.
        """
        try:
            (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
            if length > _MOST_BYTES:
                raise LinkClosed(f"a message of {length:,} bytes")
            return decoded(self._exactly(length))
        except (OSError, ValueError) as error:
            raise LinkClosed(str(error)) from error

    def _exactly(self, count: int) -> bytes:
        data = self._incoming.read(count)
        if len(data) < count:
            raise LinkClosed("it ended")
        return data

    def close(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class Meeting:
    """Where rank 0 waits for its followers.

    Args:
        address: of rank 0, at which alone it listens.
    """

    def __init__(self, address: str) -> None:
        try:
            self._listener = socket.create_server((address, 0), family=_family(address))
        except OSError as error:
            raise StartupError(f"Rank 0 cannot listen at {address}: {error}.") from error
        self.place = MeetingPlace(self._listener.getsockname()[1], secrets.token_bytes(_WORD_BYTES))

    def wait_for(self, ranks: int, patience_s: float) -> list[Link]:
        """Return the links to all followers, in the order of their ranks. Nobody can connect afterwards.

        Args:
            ranks: how many there are, rank 0 included.

        Raises:
            RanksApart: one does not come in `patience_s` seconds.
        """
        links: dict[int, Link] = {}
        end = time.monotonic() + patience_s
        with ExitStack() as opened:
            opened.callback(self._listener.close)
            while missing := set(range(1, ranks)) - links.keys():
                self._listener.settimeout(max(end - time.monotonic(), 0.01))
                try:
                    connection, _ = self._listener.accept()
                except TimeoutError as error:
                    names = ", ".join(map(str, sorted(missing)))
                    raise RanksApart(f"Rank {names} did not come in {patience_s:g} s.") from error
                rank = _rank_of(connection, self.place.secret)
                if rank in missing:
                    links[rank] = Link(connection, rank)
                else:
                    connection.close()
        return [links[rank] for rank in sorted(links)]


def _rank_of(connection: socket.socket, secret: bytes) -> int | None:
    """Return the rank of whoever has connected; None if it does not know the secret."""
    asked = os.urandom(_WORD_BYTES)
    try:
        connection.settimeout(_GREETING_S)
        connection.sendall(asked)
        answer = _read(connection, _NUMBER_BYTES + 2 * _WORD_BYTES)
        rank, proof, back = answer[:_NUMBER_BYTES], answer[_NUMBER_BYTES:-_WORD_BYTES], answer[-_WORD_BYTES:]
        if not hmac.compare_digest(proof, _proof(secret, b"follower", asked, rank)):
            return None
        connection.sendall(_proof(secret, b"rank 0", back))
    except (OSError, LinkClosed):
        return None
    return int.from_bytes(rank, "little")


def meet(address: str, place: MeetingPlace, rank: int) -> Link:
    """Connect a follower to rank 0.

    Raises:
        RanksApart: nobody answers there who knows the secret.
    """
    number, back = rank.to_bytes(_NUMBER_BYTES, "little"), os.urandom(_WORD_BYTES)
    try:
        connection = socket.create_connection((address, place.port), timeout=_TURN_S)
        asked = _read(connection, _WORD_BYTES)
        connection.sendall(number + _proof(place.secret, b"follower", asked, number) + back)
        proof = _read(connection, _WORD_BYTES)
    except (OSError, LinkClosed) as error:
        raise RanksApart(f"Rank {rank} cannot reach rank 0 at {address}:{place.port}: {error}.") from error
    if not hmac.compare_digest(proof, _proof(place.secret, b"rank 0", back)):
        raise RanksApart(f"Who answers at {address}:{place.port} is not rank 0.")
    return Link(connection, 0)


def _proof(secret: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"".join(parts), "sha256")


def _read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise LinkClosed("it ended")
        data += more
    return data


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
