"""Databases that are opened, closed and opened again."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from start_llm.storage.database import NO_TABLE, Database, DatabaseTable
from start_llm.storage.disk_thread import DiskThread


class WallClock:
    """Wall time in seconds, which moves when a test moves it."""

    def __init__(self, now: float = 1_700_000_000) -> None:
        self.now = now

    def __call__(self) -> int:
        return round(self.now * 10**9)


@contextmanager
def opened(path: Path, notices: list[str] | None = None, **options: Any) -> Generator[Database]:
    """One process with a database. What it tells is an error if nobody asks for it."""
    errors, sentences = list[Exception](), list[str]() if notices is None else notices
    thread = DiskThread(errors.append)
    thread.start()
    database = Database(path, thread, sentences.append, **options)
    try:
        yield database
    finally:
        database.close()
        assert thread.close(10)
    assert not errors
    assert notices is not None or not sentences


def pending(database: Database) -> int:
    """Number of changes that are not written yet."""
    return len(database._changes) + len(database._touches)


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


class Twice[Store]:
    """A store that never stops, and one whose process ends now and then. The time is the same for both.

    Args:
        make: makes a store with its clock and its table.
    """

    def __init__(self, path: Path, make: Callable[[WallClock, DatabaseTable], Store]) -> None:
        self.clock = WallClock()
        self._restarts = Restarts(path, wall_clock=self.clock)
        self._make = make
        self.steady = make(self.clock, NO_TABLE)
        self.restart()

    def restart(self) -> None:
        self.database = self._restarts.start()
        self.again = self._make(self.clock, self.database.table("rows"))
        assert self.database.metrics.rejected == 0

    def end(self) -> None:
        self._restarts.end()

    def __iter__(self) -> Iterator[Store]:
        self.clock.now += 1
        return iter((self.steady, self.again))

    def same(self, ask: Callable[[Store], Any]) -> Any:
        """Ask both the same, and return the answer, which has to be one."""
        left, right = map(ask, self)
        assert left == right
        return left


@contextmanager
def twice[Store](make: Callable[[WallClock, DatabaseTable], Store]) -> Generator[Twice[Store]]:
    with tempfile.TemporaryDirectory() as folder:
        stores = Twice(Path(folder) / "a.db", make)
        try:
            yield stores
        finally:
            stores.end()
