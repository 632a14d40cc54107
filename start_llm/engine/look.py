"""A question to the engine that computes nothing."""

from __future__ import annotations

import queue

from start_llm.core.events import Restored
from start_llm.core.job import Job


class Look:
    """What of a prompt is known. The engine thread answers between two steps; one HTTP thread waits."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._answer: queue.SimpleQueue[Restored | None] = queue.SimpleQueue()

    def answer(self, restored: Restored | None) -> None:
        """None: it cannot be told."""
        self._answer.put(restored)

    def wait(self, patience_s: float) -> Restored | None:
        """The answer.

        Raises:
            queue.Empty: there is none yet.
        """
        return self._answer.get(timeout=patience_s)
