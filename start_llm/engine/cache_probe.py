"""A query to the engine for what the prompt cache holds of a prompt. It computes nothing."""

import queue

from start_llm.core.engine_request import EngineRequest
from start_llm.core.events import Restored
from start_llm.core.thread_owners import ENGINE, REQUEST, owned_by


class CacheProbe:
    """One query and its answer. The engine thread answers between two steps; one HTTP thread waits."""

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self._answer: queue.SimpleQueue[Restored | None] = queue.SimpleQueue()

    @owned_by(ENGINE)
    def answer(self, restored: Restored | None) -> None:
        """Set the answer. None: the lookup failed."""
        self._answer.put(restored)

    @owned_by(REQUEST)
    def wait(self, timeout_s: float) -> Restored | None:
        """Return the answer; None if the lookup failed.

        Raises:
            queue.Empty: there is none after `timeout_s` seconds.
        """
        return self._answer.get(timeout=timeout_s)
