"""Databases that are opened, closed and opened again."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from start_llm.core.database import Database
from start_llm.core.disk_thread import DiskThread


class WallClock:
    """Wall time in seconds, which moves when it is told to."""

    def __init__(self, now: float = 1_700_000_000) -> None:
        self.now = now

    def __call__(self) -> int:
        return round(self.now * 10**9)


@contextmanager
def opened(path: Path, told: list[str] | None = None, **options: Any) -> Generator[Database]:
    """One process with a database. What it tells is an error if nobody asks for it."""
    errors, sentences = list[Exception](), list[str]() if told is None else told
    thread = DiskThread(errors.append)
    thread.start()
    database = Database(path, thread, sentences.append, **options)
    try:
        yield database
    finally:
        database.close()
        assert thread.close(10)
    assert not errors
    assert told is not None or not sentences


class Restarts:
    """A database whose process ends and starts again."""

    def __init__(self, path: Path, **options: Any) -> None:
        self._path = path
        self._options = options
        self._process: Any = None

    def start(self) -> Database:
        """End the process, if there is one, and start the next."""
        self.end()
        self._process = opened(self._path, **self._options)
        return self._process.__enter__()

    def end(self) -> None:
        if self._process:
            self._process.__exit__(None, None, None)
            self._process = None
