"""The end of the server: those who are in may finish, and nobody new comes in."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

from start_llm.core.errors import Overloaded


class Leaving:
    """Counts who is in. Safe to use from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._deadline: float | None = None

    @property
    def has_begun(self) -> bool:
        return self._deadline is not None

    @property
    def inside(self) -> int:
        """Requests that are being answered, up to the last line that is written of them."""
        return self._inside

    @contextmanager
    def let_in(self) -> Generator[None]:
        """Answer a request inside of this.

        Raises:
            Overloaded: the server is about to end.
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
        """From now on nobody is let in.

        Args:
            patience_s: how long those who are in will be waited for. Others are asked to come back after it.
        """
        with self._changed:
            self._deadline = time.monotonic() + patience_s

    def wait(self, patience_s: float) -> bool:
        """Whether all were gone within this time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._inside, patience_s)
