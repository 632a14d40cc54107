"""Hang up on clients that do not send what they have begun, after the times that port 8080 allows.

uvicorn waits for the rest of a request without end. Between two requests it waits 5 s, as long as Python's
clients keep a connection: they would use it again in the moment in which it is closed.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from start_llm.proxy.config import HEADER_S, IDLE_S

_Protocol: Any = AutoHTTPProtocol


@dataclass(frozen=True, slots=True)
class ClientTimes:
    """Seconds that clients have.

    Attributes:
        idle_s: until a request begins.
        header_s: from its first byte to the end of its headers.
    """

    idle_s: float
    header_s: float

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self:
        return cls(float(environment[IDLE_S]), float(environment[HEADER_S]))


class TimedProtocol(_Protocol):
    """uvicorn's HTTP protocol, with times for the first request and for headers. The others are uvicorn's."""

    def __init__(self, times: ClientTimes, *of_uvicorn: Any, **named: Any) -> None:
        super().__init__(*of_uvicorn, **named)
        self._times = times
        self._hang_up: asyncio.TimerHandle | None = None
        self._has_part = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._hang_up_in(self._times.idle_s)

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        had_part = self._has_part
        self._has_part = self.cycle is before and (before is None or before.response_complete)
        if not self._has_part:
            self._let_stay()
        elif not had_part:
            self._hang_up_in(self._times.header_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._let_stay()
        super().connection_lost(exc)

    def _hang_up_in(self, seconds: float) -> None:
        self._let_stay()
        self._hang_up = asyncio.get_running_loop().call_later(seconds, self.transport.close)

    def _let_stay(self) -> None:
        if self._hang_up:
            self._hang_up.cancel()
