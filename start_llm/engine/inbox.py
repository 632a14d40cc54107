"""What comes to the engine thread."""

from __future__ import annotations

import queue
from contextlib import suppress

from start_llm.engine.generation import Generation
from start_llm.engine.look import Look

type Asked = Generation | Look | None
"""None asks the engine to stop."""


class Inbox:
    """Requests and questions from HTTP threads, which only `put`; the engine thread does the rest."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Asked] = queue.SimpleQueue()
        self._is_closed = False

    def __len__(self) -> int:
        return self._queue.qsize()

    def put(self, asked: Asked) -> bool:
        """False if it may be that nobody will read it any more."""
        self._queue.put(asked)
        return not self._is_closed

    def wait(self) -> Asked:
        """The next one, as soon as there is one."""
        return self._queue.get()

    def take_all(self) -> list[Asked]:
        """All that are there."""
        taken: list[Asked] = []
        with suppress(queue.Empty):
            while True:
                taken.append(self._queue.get_nowait())
        return taken

    def close(self) -> None:
        """What comes from now on is answered by whoever puts it. What came before is still to be taken."""
        self._is_closed = True
