"""One request inside the engine: with `look`, the only thing that crosses between the threads."""

from __future__ import annotations

import queue
import threading
from contextlib import suppress

from start_llm.core.events import Event, Idle
from start_llm.core.job import Job


class Generation:
    """A queue of events from the engine thread to one HTTP thread, and a way to give up.

    The engine thread calls `emit` and reads `cancelled`; the HTTP thread calls `take` and `cancel`.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._cancelled = threading.Event()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Give up. The engine drops the request within one prefill chunk or decode step."""
        self._cancelled.set()

    def emit(self, event: Event) -> None:
        self._events.put(event)

    def take(self, patience_s: float) -> list[Event]:
        """All events that are ready, at least one: `Idle` if nothing comes for `patience_s` seconds."""
        try:
            ready = [self._events.get(timeout=patience_s)]
        except queue.Empty:
            return [Idle()]
        with suppress(queue.Empty):
            while True:
                ready.append(self._events.get_nowait())
        return ready
