"""The queue of incoming requests and queries for the engine thread."""

import queue
import threading
from contextlib import suppress
from dataclasses import dataclass

from start_llm.core.thread_owners import ENGINE, owned_by
from start_llm.engine.cache_probe import CacheProbe
from start_llm.engine.engine_task import EngineTask
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


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """Tells the engine how much memory its model has from now on, because others were loaded or unloaded.

    Attributes:
        usable_bytes: for the KV caches of running sequences.
        cache_bytes: of these, for the prompt cache.
    """

    usable_bytes: int
    cache_bytes: int


type InboxItem = Generation | CacheProbe | EngineTask | DiskNews | MemoryShare | StopRequest


class Inbox:
    """A queue that other threads fill with `put`; only the engine thread calls the other methods.

    Args:
        work_event: set when something is put in. Several inboxes may share one.

    Attributes:
        requests: requests for a reply that are in it.
    """

    def __init__(self, work_event: threading.Event | None = None) -> None:
        self._work_event = work_event or threading.Event()
        self._queue: queue.SimpleQueue[InboxItem] = queue.SimpleQueue()
        self._is_closed = False
        self._lock = threading.Lock()
        self.requests = 0

    def put(self, item: InboxItem) -> bool:
        """Add an item. Returns False if the inbox is closed, so that the engine may never read the item."""
        self._count(item, 1)
        self._queue.put(item)
        self._work_event.set()
        return not self._is_closed

    @property
    @owned_by(ENGINE)
    def is_empty(self) -> bool:
        return self._queue.empty()

    @owned_by(ENGINE)
    def take_all(self) -> list[InboxItem]:
        """Return all items that are available, without waiting."""
        taken: list[InboxItem] = []
        with suppress(queue.Empty):
            while True:
                taken.append(self._taken(self._queue.get_nowait()))
        return taken

    def _taken(self, item: InboxItem) -> InboxItem:
        self._count(item, -1)
        return item

    def _count(self, item: InboxItem, change: int) -> None:
        if isinstance(item, Generation):
            with self._lock:
                self.requests += change

    @owned_by(ENGINE)
    def close(self) -> None:
        """Make `put` return False from now on. Items that are already queued must still be taken."""
        self._is_closed = True
