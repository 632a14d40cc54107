"""Reads requests from one connection and writes replies to it, whatever they say."""

import io
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import cast

from start_llm.access.access_policy import body_length, demand_json, is_chunked
from start_llm.access.backend_secret import PROOF_HEADER
from start_llm.access.content_coding import content_coding, decoded
from start_llm.access.cross_origin import AllowedOrigins
from start_llm.core.allocator import give_back_free_memory
from start_llm.core.answering_model import ANSWERING_MODEL, in_a_header
from start_llm.core.chat import Json
from start_llm.core.client_presence import LOOK_S, held_in_turn
from start_llm.core.errors import ClientGone, InvalidRequest, LengthRequired, body_too_large, body_too_slow
from start_llm.core.unenforced import UNENFORCED
from start_llm.protocols.base import SSEFrame, new_id
from start_llm.protocols.dialects import OPENAI
from start_llm.protocols.fields import Fields, parse_body
from start_llm.protocols.routes import READING
from start_llm.server.connection import BoundedWriter, DeadlineReader, drain, is_closed_by_peer
from start_llm.server.listener import Listener

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class EventStream:
    """Writes frames. A chunked stream without `end` shows the client that it was cut.

    Args:
        write: sends bytes to the client, or raises `ClientGone`.
        chunked: frame the body in HTTP/1.1 chunks; otherwise closing the connection ends it.
    """

    def __init__(self, write: Callable[[bytes], object], *, chunked: bool) -> None:
        self._write = write
        self._chunked = chunked
        self._last_write = time.monotonic()

    @property
    def headers(self) -> dict[str, str]:
        return _HEADERS | ({"Transfer-Encoding": "chunked"} if self._chunked else {"Connection": "close"})

    @property
    def silent_for_s(self) -> float:
        return time.monotonic() - self._last_write

    def send(self, frames: Iterable[SSEFrame]) -> None:
        data = b"".join(frame.encoded() for frame in frames)
        if data:
            self._send(data)

    def _send(self, data: bytes) -> None:
        self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        self._last_write = time.monotonic()

    def send_comment(self, text: str) -> None:
        """Send a line that readers of events ignore, while there is nothing to send yet."""
        self._send(f": {text}\n\n".encode())

    def end(self) -> None:
        """Mark the stream as complete."""
        if self._chunked:
            self._write(b"0\r\n\r\n")


_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")
_LONGEST_LINE = 4096
_MOST_TRAILER_BYTES = 65536


def read_chunked(stream: io.BufferedIOBase, max_bytes: int) -> bytes:
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


def _size(stream: io.BufferedIOBase) -> int:
    match = _SIZE.fullmatch(_line(stream))
    if match is None:
        raise InvalidRequest("A chunk of the body does not begin with its size.")
    return int(match[1], 16)


def _skip_trailers(stream: io.BufferedIOBase) -> None:
    left = _MOST_TRAILER_BYTES
    while (line := _line(stream)) != b"\r\n":
        left -= len(line)
        if left < 0:
            raise InvalidRequest("The fields behind the body are too long.")


def _line(stream: io.BufferedIOBase) -> bytes:
    line = stream.readline(_LONGEST_LINE)
    if not line or (not line.endswith(b"\n") and len(line) < _LONGEST_LINE):
        raise ClientGone("the client hung up in the middle of its request")
    if not line.endswith(b"\r\n"):
        raise InvalidRequest("A line between the chunks of the body is too long, or has no end.")
    return line


def _exactly(stream: io.BufferedIOBase, count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise ClientGone("the client hung up in the middle of its request")
    return data


_LARGE_BODY = 4 * 2**20
_LARGE_PARSING = threading.Lock()
_EMPTY_LINES = (b"\r\n", b"\n")


class HttpConnection(BaseHTTPRequestHandler):
    """The connection of one client, which sends its requests one after another.

    A subclass serves them: it has the methods that http.server calls.
    """

    server: Listener  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    # Version assumed for an unreadable request line. http.server's default, 0.9, has no status line.
    default_request_version = "HTTP/1.0"
    server_version = "start_llm"
    sys_version = ""
    raw_requestline: bytes

    def setup(self) -> None:
        limits = self.server.limits
        self.connection = cast("socket.socket", self.request)
        with suppress(OSError):  # macOS refuses it for a connection that its client has reset
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        self._reader = DeadlineReader(self.connection)
        self.rfile = self._buffer = io.BufferedReader(self._reader, 65536)
        self.wfile = cast("io.BufferedIOBase", BoundedWriter(self.connection, limits.write_s))
        self._unread_body = False
        self._last_look = 0.0
        self._stream_begun: EventStream | None = None
        self._is_behind_empty_line = False

    def finish(self) -> None:
        if self._unread_body:
            drain(self.connection)

    def handle_one_request(self) -> None:
        self._stream_begun, self._had_large_body, self._has_replied = None, False, False
        self._answering = ""
        self._unenforced = self._proof = ""
        self._limit_headers: Mapping[str, str] = {}
        self._dialect, self._request_id, self.path = OPENAI, new_id("req_"), ""
        try:
            self._reader.allow(self.server.limits.idle_s)
            if not self._buffer.peek(1):
                self.close_connection = True
                return
            self.server.connections.receives(self.connection)
            self._reader.allow(self.server.limits.header_s)
            super().handle_one_request()
        except (ClientGone, ConnectionError, TimeoutError):
            # Nobody is left to answer: the client closed the connection or never sent a complete request.
            self.close_connection = True
        finally:
            if self._had_large_body:
                give_back_free_memory()

    def parse_request(self) -> bool:
        """Parse the head of a request. Returns False if there is none.

        One empty line before it is ignored (RFC 9112, 2.2): what then comes is waited for as a next request.
        """
        self._is_behind_empty_line = not self._is_behind_empty_line and self.raw_requestline in _EMPTY_LINES
        if self._is_behind_empty_line:
            self.close_connection = False
            return False
        return super().parse_request()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in http.server
        """Do nothing. The service logs requests, because it knows their outcome."""

    def _has_left(self) -> bool:
        """Return whether the client has closed the connection. Looks at most every 50 ms."""
        now = time.monotonic()
        if now - self._last_look < LOOK_S:
            return False
        self._last_look = now
        return is_closed_by_peer(self.connection)

    @property
    def _origins(self) -> AllowedOrigins:
        return self.server.access_policy.origins

    def _lower_headers(self) -> dict[str, str]:
        return {name.lower(): value for name, value in self.headers.items()}

    # ------------------------------------------------------------------------------------------------ bodies

    def _may_have_body(self) -> bool:
        """Return True if a body may follow. A body of unknown length leaves the connection unusable."""
        announced = "content-length" in self.headers or "transfer-encoding" in self.headers
        return announced or self.command not in (*READING, "OPTIONS")

    def _read_fields(self) -> Fields:
        """Read and parse the body. While Python's parser is at work, nobody else is: large ones take turns.

        Raises:
            RequestError: it is too long or too slow, or no JSON object.
            ClientGone: the client has left before its end.
        """
        raw = self._read_body()
        if len(raw) < _LARGE_BODY:
            return parse_body(raw)
        self._had_large_body = True
        with held_in_turn(_LARGE_PARSING):
            return parse_body(raw)

    def _read_body(self) -> bytes:
        coding = content_coding(self._joined_header("content-encoding"))
        length = self._body_length()
        demand_json(self.headers.get("content-type"))
        self._reader.allow(self.server.limits.body_s)
        try:
            with self.server.connections.not_busy(self.connection):
                body = self._received(length)
        except TimeoutError as error:
            raise body_too_slow(self.server.limits.body_s) from error
        self._unread_body = False
        return decoded(body, coding, self.server.limits.max_body_bytes)

    def _received(self, length: int | None) -> bytes:
        """Return the bytes of the body; of no length are those in chunks."""
        if length is None:
            return read_chunked(self._buffer, self.server.limits.max_body_bytes)
        body = self.rfile.read(length)
        if len(body) < length:
            raise ClientGone("the client hung up in the middle of its request")
        return body

    def _joined_header(self, name: str) -> str | None:
        """Return the values of a header that may be given several times."""
        values = self.headers.get_all(name)
        return None if values is None else ", ".join(values)

    def _body_length(self) -> int | None:
        """Return the length of the body, None if it comes in chunks."""
        headers = {name.lower(): ", ".join(set(self.headers.get_all(name, []))) for name in self.headers}
        if (coding := self._joined_header("transfer-encoding")) is not None:
            headers["transfer-encoding"] = coding
            if self.request_version != "HTTP/1.1":
                raise InvalidRequest("Transfer-Encoding belongs to HTTP/1.1.")
        length = body_length(headers, self.server.limits.max_body_bytes)
        if length is None and not is_chunked(headers):
            raise LengthRequired("The request needs Content-Length, or Transfer-Encoding: chunked.")
        return length

    # ----------------------------------------------------------------------------------------------- replies

    def _begin_stream(self) -> EventStream:
        """Return the stream of the reply. Its head is sent if it has not been."""
        if self._stream_begun is None:
            stream = EventStream(self.wfile.write, chunked=self.request_version == "HTTP/1.1")
            self._send_head(HTTPStatus.OK, stream.headers)
            self._stream_begun = stream
        return self._stream_begun

    def _send_json(
        self, status: int, payload: Mapping[str, Json], extra: Mapping[str, str] | None = None
    ) -> None:
        body = json.dumps(payload, ensure_ascii=False).encode()
        self._send_body(status, {"Content-Type": "application/json", **(extra or {})}, body)

    def _send_body(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Send a whole reply. One without a body (204) has no length either."""
        headers = {**headers, "Content-Length": str(len(body))} if body else headers
        if self._unread_body or self.close_connection:
            headers = {**headers, "Connection": "close"}
        self._send_head(status, headers)
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_head(self, status: int, headers: Mapping[str, str]) -> None:
        self._note_response(status)
        self._has_replied = True
        self.send_response(status)
        self.send_header(self._dialect.id_header, self._request_id)
        if self._answering:
            self.send_header(ANSWERING_MODEL, in_a_header(self._answering))
        if self._unenforced:
            self.send_header(UNENFORCED, self._unenforced)
        if self._proof:
            self.send_header(PROOF_HEADER, self._proof)
        asked = self._lower_headers() if self.command else {}
        for name, value in {**self._limit_headers, **headers, **self._origins.headers(asked)}.items():
            self.send_header(name, value)
        self.end_headers()

    def _note_response(self, status: int) -> None:
        """Count a reply, before its first byte is sent."""
        raise NotImplementedError
