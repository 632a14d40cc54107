"""A request in the engine, which an HTTP thread and the engine thread share; see `engine.inbox`."""

import math
import queue
import threading
from collections.abc import Iterable
from contextlib import suppress

from start_llm.core.engine_request import EngineRequest
from start_llm.core.events import Event, Idle
from start_llm.core.thread_owners import REQUEST, owned_by

_INTERVAL_S = 0.08
"""Twelve pieces of text a second flow for a reader, and each costs a switch between threads.

Shorter than a reader waits before it looks after its client, which costs as much.
"""


class Generation:
    """A queue of events from the engine thread to one HTTP thread, and a flag to cancel.

    The engine thread reads `cancelled`, and calls `hold` and `send`; the HTTP thread calls `take`. Both call
    `cancel`: the engine for idle work that gives way, and for a reply that cannot go on. Both call `emit`:
    the HTTP thread where the engine takes no more requests.

    Attributes:
        number: in the order in which the engine received its requests, which sets it.
        yields_until: seconds on the engine's clock until which it makes way for all others; see
            `engine.schedule`.
    """

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.number = 0
        self.yields_until = 0.0
        self._held: list[Event] = []
        self._events: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._is_over = False
        self._sent_at = -math.inf

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    @property
    def is_given_up(self) -> bool:
        """True if it was cancelled before its reply was complete."""
        return self.cancelled and not self._is_over

    def cancel(self, *, is_over: bool = False) -> None:
        """Cancel the request. The engine drops it within one prefill chunk or decode step.

        Args:
            is_over: the reply is complete, although the model has not ended it.
        """
        self._is_over |= is_over
        self._cancelled.set()

    def emit(self, event: Event) -> None:
        self.hold([event])
        self.send()

    def hold(self, events: Iterable[Event]) -> None:
        """Emit events at the next `send`."""
        self._held += events

    def send(self) -> None:
        """Wake the reader, once for all events that are held."""
        if self._held:
            self._events.put(self._held)
            self._held = []

    def send_at_intervals(self, now: float) -> None:
        """Wake the reader, unless that was done a moment ago.

        Args:
            now: seconds.
        """
        if now - self._sent_at >= _INTERVAL_S:
            self.send()
            self._sent_at = now

    @owned_by(REQUEST)
    def take(self, timeout_s: float) -> list[Event]:
        """Return the events that are ready. Never empty: `[Idle()]` if none comes in `timeout_s` seconds."""
        try:
            ready = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return [Idle()]
        with suppress(queue.Empty):
            while True:
                ready += self._events.get_nowait()
        return ready
