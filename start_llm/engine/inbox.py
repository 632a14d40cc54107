"""The queue of incoming requests and queries for the engine thread."""

from __future__ import annotations

import queue
from contextlib import suppress
from dataclasses import dataclass

from start_llm.engine.cache_probe import CacheProbe
from start_llm.engine.generation import Generation


@dataclass(frozen=True, slots=True)
class DiskNews:
    """The disk thread has written or read something."""


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Asks the engine to stop.

    Attributes:
        flush_s: seconds for writing what is cached to the disk.
    """

    flush_s: float = 0.0


type InboxItem = Generation | CacheProbe | DiskNews | StopRequest


class Inbox:
    """A queue that HTTP threads fill with `put`; only the engine thread calls the other methods."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[InboxItem] = queue.SimpleQueue()
        self._is_closed = False

    def __len__(self) -> int:
        return self._queue.qsize()

    def put(self, asked: InboxItem) -> bool:
        """Add an item. Returns False if the inbox is closed, so that the engine may never read the item."""
        self._queue.put(asked)
        return not self._is_closed

    def wait(self, timeout_s: float | None = None) -> list[InboxItem]:
        """Wait for the next item and return it; return nothing if none comes in this time."""
        with suppress(queue.Empty):
            return [self._queue.get(timeout=timeout_s)]
        return []

    def take_all(self) -> list[InboxItem]:
        """Return all items that are available, without waiting."""
        taken: list[InboxItem] = []
        with suppress(queue.Empty):
            while True:
                taken.append(self._queue.get_nowait())
        return taken

    def close(self) -> None:
        """Make `put` return False from now on. Items that are already queued must still be taken."""
        self._is_closed = True
