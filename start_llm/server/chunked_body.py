"""Reads a request body that comes in chunks (`Transfer-Encoding: chunked`)."""

from __future__ import annotations

import re
from typing import Protocol

from start_llm.core.errors import ClientGone, InvalidRequest, body_too_large

_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")
_LONGEST_LINE = 4096
_MOST_TRAILER_BYTES = 65536


class Stream(Protocol):
    """A buffered stream of bytes. Reading waits until there is what was asked for, or the stream ends."""

    def read(self, size: int, /) -> bytes: ...

    def readline(self, size: int, /) -> bytes: ...


def read_chunked(stream: Stream, max_bytes: int) -> bytes:
    """Read the chunks and what follows them. After an error the rest of the connection means nothing.

    Raises:
        BodyTooLarge: the chunks together are longer than the limit.
        InvalidRequest: their framing is malformed.
        ClientGone: the client closed the connection in the middle.
    """
    body = bytearray()
    while size := _size(stream):
        if len(body) + size > max_bytes:
            raise body_too_large(max_bytes)
        body += _exactly(stream, size)
        if _exactly(stream, 2) != b"\r\n":
            raise InvalidRequest("A chunk of the body is not as long as it says.")
    _skip_trailers(stream)
    return bytes(body)


def _size(stream: Stream) -> int:
    match = _SIZE.fullmatch(_line(stream))
    if match is None:
        raise InvalidRequest("A chunk of the body does not begin with its size.")
    return int(match[1], 16)


def _skip_trailers(stream: Stream) -> None:
    left = _MOST_TRAILER_BYTES
    while (line := _line(stream)) != b"\r\n":
        left -= len(line)
        if left < 0:
            raise InvalidRequest("The fields behind the body are too long.")


def _line(stream: Stream) -> bytes:
    line = stream.readline(_LONGEST_LINE)
    if not line or (not line.endswith(b"\n") and len(line) < _LONGEST_LINE):
        raise ClientGone("the client hung up in the middle of its request")
    if not line.endswith(b"\r\n"):
        raise InvalidRequest("A line between the chunks of the body is too long, or has no end.")
    return line


def _exactly(stream: Stream, count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise ClientGone("the client hung up in the middle of its request")
    return data
