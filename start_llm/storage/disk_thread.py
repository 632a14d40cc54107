"""A thread for disk work, so that no other thread waits for the disk.

Jobs see file descriptors, bytes and memory views. None of them calls MLX, whose arrays belong to the engine
thread.
"""

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from start_llm.core.thread_owners import DISK, take_role

type Job = Callable[[], None]

_URGENT, _USUAL, _LAST = range(3)


class DiskThread:
    """Runs jobs one after the other: urgent ones first, those that may wait last, and each kind in the order
    in which they were submitted.

    A job handles its own errors. One that raises anyway does not end the thread.

    Args:
        on_error: called on this thread with what a job has raised.
        clock: returns seconds.
    """

    def __init__(
        self,
        on_error: Callable[[Exception], None],
        clock: Callable[[], float] = time.monotonic,
        name: str = "disk",
    ) -> None:
        self._on_error = on_error
        self._clock = clock
        self._numbers = itertools.count()
        self._ready: list[tuple[int, int, Job]] = []
        self._later: list[tuple[float, int, Job]] = []
        self._condition = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(
        self, job: Job, *, is_urgent: bool = False, may_wait: bool = False, after_s: float = 0
    ) -> bool:
        """Queue a job. Returns False, and queues nothing, once the thread is closing.

        Args:
            is_urgent: somebody waits for it, so it runs before all that are not.
            may_wait: it runs when there is nothing else.
            after_s: seconds to wait before the job is queued. `close` runs it at once.
        """
        with self._condition:
            if self._is_closing:
                return False
            number = next(self._numbers)
            if after_s:
                heapq.heappush(self._later, (self._clock() + after_s, number, job))
            else:
                rank = _URGENT if is_urgent else _LAST if may_wait else _USUAL
                heapq.heappush(self._ready, (rank, number, job))
            self._condition.notify()
            return True

    def close(self, patience_s: float) -> bool:
        """Run what is queued, then end the thread. Returns False if it still runs after `patience_s`."""
        with self._condition:
            self._is_closing = True
            self._condition.notify()
        if self._thread.ident is not None:
            self._thread.join(patience_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        take_role(DISK)
        while (job := self._next()) is not None:
            try:
                job()
            except Exception as error:  # noqa: BLE001 - other jobs must not suffer from one
                with suppress(Exception):  # nor from a report that cannot be printed
                    self._on_error(error)
            job = None  # and all that it holds: before the next one comes, that may belong to another thread

    def _next(self) -> Job | None:
        """Wait for the next job. Returns None at the end."""
        with self._condition:
            while True:
                self._queue_due()
                if self._ready:
                    return heapq.heappop(self._ready)[2]
                if self._is_closing:
                    return None
                self._condition.wait(self._later[0][0] - self._clock() if self._later else None)

    def _queue_due(self) -> None:
        now = self._clock()
        while self._later and (self._is_closing or self._later[0][0] <= now):
            _, number, job = heapq.heappop(self._later)
            heapq.heappush(self._ready, (_USUAL, number, job))
