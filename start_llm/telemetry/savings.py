"""Count the prompt tokens that were not read twice over the last hour and the last day."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

LEAST_TIMED_TOKENS = 32
"""Of fewer tokens the time says more about one step of the network than about reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReading:
    """What was read of prompts.

    Attributes:
        cached: prompt tokens that the cache had.
        computed: prompt tokens that were computed.
        timed_tokens, timed_s: those of `computed` whose time is known, and the seconds from the start of
            their prefill to the first token of the reply.
        disk_s: seconds that prompts waited for the disk.
    """

    cached: int = 0
    computed: int = 0
    timed_tokens: int = 0
    timed_s: float = 0.0
    disk_s: float = 0.0

    @classmethod
    def of_request(
        cls, *, cached: int, computed: int, prefill_s: float | None, disk_s: float
    ) -> PromptReading:
        """Return the reading of one request. `prefill_s` is None if no reply began."""
        is_timed = prefill_s is not None and computed >= LEAST_TIMED_TOKENS
        return cls(
            cached=cached,
            computed=computed,
            timed_tokens=computed if is_timed else 0,
            timed_s=prefill_s if is_timed and prefill_s else 0.0,
            disk_s=disk_s,
        )

    def __add__(self, other: PromptReading) -> PromptReading:
        return PromptReading(
            cached=self.cached + other.cached,
            computed=self.computed + other.computed,
            timed_tokens=self.timed_tokens + other.timed_tokens,
            timed_s=self.timed_s + other.timed_s,
            disk_s=self.disk_s + other.disk_s,
        )

    @property
    def tokens_per_s(self) -> float | None:
        """Measured prefill speed; None if nothing was measured."""
        return self.timed_tokens / self.timed_s if self.timed_s > 0 else None


class SlidingTotal:
    """The sum over the last so many seconds, to within one slot.

    Args:
        slot_s: seconds of a slot.
        slots: number of slots that count, the present one included.
    """

    def __init__(self, slot_s: float, slots: int) -> None:
        self._slot_s = slot_s
        self._slots = slots
        self._sums: deque[tuple[int, PromptReading]] = deque(maxlen=slots)

    def add(self, now: float, reading: PromptReading) -> None:
        slot = int(now // self._slot_s)
        if self._sums and self._sums[-1][0] >= slot:  # also if the clock was set back
            slot, before = self._sums.pop()
            reading = before + reading
        self._sums.append((slot, reading))

    def total(self, now: float) -> PromptReading:
        first = int(now // self._slot_s) - self._slots + 1
        while self._sums and self._sums[0][0] < first:
            self._sums.popleft()
        return sum((reading for _, reading in self._sums), PromptReading())


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """What the cache has saved over some time.

    Attributes:
        saved_s: estimated seconds; None while no speed was measured.
    """

    cached: int
    computed: int
    saved_s: float | None


class Savings:
    """Prompt tokens of the last hour and the last day. Safe to use from any thread.

    The time saved is an estimate: cached tokens divided by the prefill speed of computed tokens, less the
    time that prompts waited for the disk. The speed is that of all requests of the last day that computed at
    least 32 tokens, from the start of their prefill to their first token. It is the speed as it was lived,
    with other requests beside. Long prompts take more time for each token than short ones, so the estimate is
    low where the cached prompts are longer than the computed ones, and high where they are shorter.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._hour = SlidingTotal(60, 60)
        self._day = SlidingTotal(900, 96)
        self._lock = threading.Lock()

    def add(self, reading: PromptReading) -> None:
        with self._lock:
            now = self._clock()
            self._hour.add(now, reading)
            self._day.add(now, reading)

    def of_hour_and_day(self) -> tuple[Saving, Saving]:
        with self._lock:
            now = self._clock()
            hour, day = self._hour.total(now), self._day.total(now)
        speed = day.tokens_per_s
        return _saving(hour, speed), _saving(day, speed)


def _saving(reading: PromptReading, speed: float | None) -> Saving:
    saved_s = max(reading.cached / speed - reading.disk_s, 0.0) if speed else None
    return Saving(cached=reading.cached, computed=reading.computed, saved_s=saved_s)
