"""What passes between the engine thread and the disk thread. Everything here is safe on both."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from start_llm.cache.disk.disk_reads import DiskRead, DiskWait

if TYPE_CHECKING:
    from collections.abc import Callable

    from start_llm.cache.buffers import Outgoing
    from start_llm.cache.disk.disk_index import FileName
    from start_llm.telemetry.metrics import DiskMetrics

MOST_IN_FLIGHT = 3
"""Files that may wait for the disk at once. Their arrays take memory."""
_MOST_REFUSED = 4096
"""Files that are remembered because they could not be written. Then the oldest of them may be tried again."""


class DiskTraffic:
    """The files that wait to be written, read or checked.

    Args:
        refused_s: seconds after which a file that could not be written may be tried again.

    Attributes:
        notify: called on the disk thread when something that may be waited for is over.
        refusals: how often a file could not be written so far.
    """

    def __init__(self, metrics: DiskMetrics, refused_s: float) -> None:
        self.notify: Callable[[], None] = lambda: None
        self._metrics = metrics
        self._refused_s = refused_s
        self._queued: set[FileName] = set()
        self._refused: dict[FileName, float] = {}
        self.refusals = 0
        self._checking: set[FileName] = set()
        self._written: deque[Outgoing] = deque()
        self._reads: set[DiskRead] = set()
        self._changed = threading.Condition()

    # ----------------------------------------------------------------------------------------------- writing

    @property
    def is_full(self) -> bool:
        """True if as many files wait for the disk as may."""
        return len(self._queued) >= MOST_IN_FLIGHT

    def is_queued(self, name: FileName) -> bool:
        return name in self._queued

    def note_queued(self, name: FileName) -> None:
        with self._changed:
            self._queued.add(name)
        self._metrics.note_queued(1)

    def note_done(self, name: FileName, content: Outgoing | None = None) -> None:
        """Note that a file waits no longer: it is written, or will not be.

        Args:
            content: its tensors, which `take_written` returns. None: they were never handed over.
        """
        if content:
            self._written.append(content)
        with self._changed:
            self._queued.discard(name)
            self._changed.notify_all()
        self._metrics.note_queued(-1)
        self.notify()

    def is_refused(self, name: FileName) -> bool:
        """Return whether a file could not be written, and is not tried again yet."""
        return time.monotonic() < self._refused.get(name, 0)

    def refused_left_s(self, name: FileName) -> float:
        """Return the seconds after which a file that could not be written may be tried again."""
        return max(self._refused.get(name, 0) - time.monotonic(), 0)

    def forget_refusals(self) -> None:
        """Let everything be tried again that could not be written."""
        with self._changed:
            self._refused.clear()

    def note_refused(self, name: FileName) -> None:
        """Note that a file could not be written. What was short, memory or room, may be there later."""
        with self._changed:
            self.refusals += 1
            self._refused[name] = time.monotonic() + self._refused_s
            if len(self._refused) > _MOST_REFUSED:
                del self._refused[next(iter(self._refused))]

    def take_written(self) -> list[Outgoing]:
        """Return the tensors of the files that were written since the last call."""
        return [self._written.popleft() for _ in range(len(self._written))]

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait until something is so, but no longer than this; it is asked whenever anything has ended."""
        with self._changed:
            self._changed.wait_for(condition, timeout_s)

    # ----------------------------------------------------------------------------------------------- reading

    def begin_read(self, job: DiskRead) -> None:
        with self._changed:
            self._reads.add(job)

    def end(self, wait: DiskWait) -> None:
        """Tell that something is over for which a prompt waits."""
        with self._changed:
            if isinstance(wait, DiskRead):
                self._reads.discard(wait)
            wait.is_over = True
            self._changed.notify_all()
        self.notify()

    @property
    def being_read(self) -> set[FileName]:
        """The files that prompts wait for."""
        with self._changed:
            return {part.file.name for job in self._reads for part in job.parts}

    # ---------------------------------------------------------------------------------------------- checking

    def begin_check(self, name: FileName) -> bool:
        """Note that a file is to be checked. Returns False if it already waits for that."""
        with self._changed:
            is_new = name not in self._checking
            self._checking.add(name)
            return is_new

    def note_checked(self, name: FileName) -> None:
        with self._changed:
            self._checking.discard(name)
            self._changed.notify_all()

    def wait_for_checks(self, timeout_s: float) -> bool:
        """Wait until all files are checked that are to be. False if they are not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._checking, timeout_s)
