"""Hang up on clients that do not send what they have begun, after the times that port 8080 allows.

uvicorn waits for the rest of a request without end. Between two requests it waits 5 s, as long as Python's
clients keep a connection: they would use it again in the moment in which it is closed.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

_Protocol: Any = AutoHTTPProtocol


class TimedProtocol(_Protocol):
    """uvicorn's HTTP protocol, with times for the first request and for headers. The others are uvicorn's.

    Args:
        idle_s: seconds until a request begins.
        header_s: seconds from its first byte to the end of its headers.
    """

    def __init__(self, idle_s: float, header_s: float, *of_uvicorn: Any, **named: Any) -> None:
        super().__init__(*of_uvicorn, **named)
        self._idle_s, self._header_s = idle_s, header_s
        self._hang_up: asyncio.TimerHandle | None = None
        self._has_part = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._hang_up_in(self._idle_s)

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        had_part = self._has_part
        self._has_part = self.cycle is before and (before is None or before.response_complete)
        if not self._has_part:
            self._let_stay()
        elif not had_part:
            self._hang_up_in(self._header_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._let_stay()
        super().connection_lost(exc)

    def _hang_up_in(self, seconds: float) -> None:
        self._let_stay()
        self._hang_up = asyncio.get_running_loop().call_later(seconds, self.transport.close)

    def _let_stay(self) -> None:
        if self._hang_up:
            self._hang_up.cancel()
