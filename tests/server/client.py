"""A client that may misbehave: any bytes on a socket, and a strict reader of what comes back."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class CutOff(Exception):
    """The connection ended in the middle of a body."""


@dataclass(frozen=True)
class Reply:
    """One reply, read to the end that its framing gives it. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, which every refusal has in the same form."""
        assert self.headers["content-type"] == "application/json"
        error = self.json["error"]
        assert sorted(error) == ["code", "message", "param", "type"]
        return error


def message(
    method: str,
    path: str,
    body: object = None,
    headers: Mapping[str, str] | None = None,
    version: str = "1.1",
) -> bytes:
    """A well-formed request. `body` is bytes, or something to send as JSON; None sends none."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    implied = {} if body is None else {"Content-Length": str(len(data)), "Content-Type": "application/json"}
    own = {"Host": "localhost", **implied, **(headers or {})}
    lines = [f"{name}: {value}\r\n" for name, value in own.items()]
    return f"{method} {path} HTTP/{version}\r\n{''.join(lines)}\r\n".encode("latin-1") + data


class Client:
    """One connection. Reading waits for at most `patience_s` seconds at a time.

    Args:
        receive_buffer: bytes that the kernel may hold for this client, if it is to hold few.
    """

    def __init__(self, port: int, *, patience_s: float = 20, receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(patience_s)
        self.socket.connect(("127.0.0.1", port))
        self._file = self.socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        self.socket.close()

    def reset(self) -> None:
        """Leave as a crashed machine does: nothing is flushed, the other end gets a reset."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def request(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> None:
        self.send(message(method, path, body, headers))

    def ask(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """Send a request and read its reply."""
        self.request(method, path, body, headers)
        return self.reply(has_body=method != "HEAD")

    def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of a reply, and none of its body."""
        line = self._file.readline()
        if not line:
            raise CutOff("closed without a reply")
        version, status, _ = line.decode("ascii").split(" ", 2)
        assert version == "HTTP/1.1"
        headers: dict[str, str] = {}
        while (line := self._file.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            assert name.lower() not in headers, f"{name} is given twice"
            headers[name.lower()] = value.strip()
        return int(status), headers

    def reply(self, *, has_body: bool = True) -> Reply:
        status, headers = self.head()
        if status in (100, 204) or not has_body:
            return Reply(status, headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            return Reply(status, headers, b"".join(self.chunks()))
        if "content-length" in headers:
            return Reply(status, headers, self._exactly(int(headers["content-length"])))
        assert headers["connection"] == "close"
        return Reply(status, headers, self._file.read())

    def chunks(self) -> Iterator[bytes]:
        """The chunks of a body, up to the last one.

        Raises:
            CutOff: the connection ended before the last chunk.
        """
        while True:
            line = self._file.readline()
            if not line:
                raise CutOff("no last chunk")
            chunk = self._exactly(int(line, 16))
            assert self._exactly(2) == b"\r\n"
            if not chunk:
                return
            yield chunk

    def events(self) -> Iterator[Any]:
        """The data of each server-sent event in a chunked body; `[DONE]` as that string."""
        for chunk in self.chunks():
            yield from events_in(chunk)

    def is_closed(self) -> bool:
        """True if the server hangs up without another byte. Waits for as long as the client's patience."""
        with suppress(ConnectionResetError):
            return self._file.read(1) == b""
        return True

    def some(self, most: int) -> bytes:
        """At least one byte of a body, at most `most`.

        Raises:
            CutOff: the connection has ended.
        """
        data = self._file.read1(most)
        if not data:
            raise CutOff("no more bytes")
        return data

    def _exactly(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise CutOff(f"{len(data)} of {size} bytes")
        return data


def events_in(body: bytes) -> Iterator[Any]:
    """The data of whole server-sent events. Nothing but single-line data may stand in them."""
    assert body.endswith(b"\n\n")
    for event in body[:-2].split(b"\n\n"):
        assert event.startswith(b"data: ")
        assert b"\n" not in event
        data = event.removeprefix(b"data: ").decode()
        yield data if data == "[DONE]" else json.loads(data)


def ask(
    port: int, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
) -> Reply:
    """One request on a connection of its own."""
    with Client(port) as client:
        return client.ask(method, path, body, headers)


def stats(port: int) -> Any:
    return ask(port, "GET", "/stats").json


def engine_is_free(port: int) -> bool:
    """True if no request is anywhere in the server."""
    now = stats(port)
    engine, requests = now["engine"], now["requests"]
    return not (
        engine["prefill"]
        or engine["waiting"]
        or now["batch"]["active_rows"]
        or requests["in_flight"]
        or any(model["in_flight"] for model in now["models"])
    )


def wait_until(condition: Callable[[], bool], *, within_s: float) -> float:
    """Return after how many seconds the condition held; fail if it took longer than `within_s`."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within_s, "it did not come true in time"
        time.sleep(0.005)
    return time.monotonic() - began


def without_cached(usage: dict[str, Any]) -> dict[str, Any]:
    """The counts that do not depend on what was asked before."""
    return {name: count for name, count in usage.items() if name != "prompt_tokens_details"}
