"""Lets running requests finish when the server stops, and refuses new ones."""

import math
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

from start_llm.core.errors import Overloaded


class RequestDrain:
    """Counts running requests. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._deadline: float | None = None

    @property
    def has_begun(self) -> bool:
        return self._deadline is not None

    @property
    def left_s(self) -> float:
        """Seconds that running requests still have once the server stops; below 0: their time is over."""
        return math.inf if self._deadline is None else self._deadline - time.monotonic()

    @property
    def inside(self) -> int:
        """Number of requests in progress. A request counts until its last log line is written."""
        return self._inside

    @contextmanager
    def admit_request(self) -> Generator[None]:
        """Count a request while the block runs.

        Raises:
            Overloaded: the server is stopping.
        """
        with self._changed:
            if self._deadline is not None:
                left = math.ceil(self._deadline - time.monotonic())
                raise Overloaded("The server is stopping; try again in a moment.", retry_after_s=max(left, 1))
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def begin(self, patience_s: float) -> None:
        """Refuse all requests from now on.

        Args:
            patience_s: time for running requests to finish; refused clients are asked to retry after it.
        """
        with self._changed:
            self._deadline = time.monotonic() + patience_s

    def wait(self, patience_s: float) -> bool:
        """Wait until all requests have finished. Return False if that takes longer than `patience_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._inside, patience_s)
