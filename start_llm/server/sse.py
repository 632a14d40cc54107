"""Writes server-sent events, in HTTP/1.1 chunks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from start_llm.protocols.base import SSEFrame, json_text

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def encode(frame: SSEFrame) -> bytes:
    """Encode one event: its name if it has one, `data: ...` and a blank line."""
    data = frame.data
    text = data if isinstance(data, str) else json_text(data)
    name = f"event: {frame.event}\n" if frame.event else ""
    return f"{name}data: {text}\n\n".encode()


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
        data = b"".join(encode(frame) for frame in frames)
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
