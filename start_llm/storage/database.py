"""Tables that outlive the process. A disk thread of their own writes them behind.

It is not the one that reads files for prompts, which should not wait for a checkpoint of SQLite.

A change is noted in memory, and written about a second later with all changes of all tables, in one
transaction. So whenever the process is killed, the file holds what the tables held at some earlier moment. A
file that is not whole is deleted: a row that is lost could be the one that forbids the use of another.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from start_llm.storage.database_file import UNREADABLE, DatabaseFile, RowName, StoredRow, UnusableFile
from start_llm.storage.disk_thread import DiskThread

_WRITE_AFTER_S = 1.0
_RETRY_AFTER_S = 30.0
_TOUCHES_EVERY_NS = 600 * 10**9
"""Mere uses are written this rarely: a request uses hundreds of rows, and a lost use does no harm."""
_MAX_PENDING_BYTES = 128 * 2**20
_CHANGE_BYTES = 300
"""Approximate size of a noted change without its key and value."""


class DatabaseRow(NamedTuple):
    """A row as it was read at the start.

    Attributes:
        age_s: seconds since its value was written.
        idle_s: seconds since it was written or used last.
    """

    key: bytes
    value: bytes
    age_s: float
    idle_s: float


@dataclass(slots=True)
class DatabaseMetrics:
    """Counters of a database.

    Attributes:
        is_on: changes are kept. False if the file cannot be used, and after `Database.close`.
        loaded: rows that were read at the start.
        rejected: those of them that a store could not use.
        resets: files that were damaged or of another format, and were deleted.
        written: changes that were written.
        failures: tries to write that failed.
        nbytes: size of the file.
    """

    is_on: bool = False
    loaded: int = 0
    rejected: int = 0
    resets: int = 0
    written: int = 0
    failures: int = 0
    nbytes: int = 0


class _PendingChange(NamedTuple):
    """A change that is not written yet. `value` is None if the row is deleted."""

    at_ns: int
    value: bytes | None


class Database:
    """The file with all tables. Safe to use from any thread.

    It is read when it is made. If it cannot be used, its tables are empty and forget what they are given.

    Args:
        path: the file, which belongs to this process alone.
        thread: writes the file.
        tell: called with a sentence for the user, on its thread too.
        write_after_s: seconds from a change until it is written.
        wall_clock: returns nanoseconds.
    """

    def __init__(
        self,
        path: Path,
        thread: DiskThread,
        tell: Callable[[str], None],
        *,
        write_after_s: float = _WRITE_AFTER_S,
        max_pending_bytes: int = _MAX_PENDING_BYTES,
        wall_clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self.metrics = DatabaseMetrics()
        self._name = path.name
        self._file = DatabaseFile(path)
        self._thread = thread
        self._tell = tell
        self._write_after_s = write_after_s
        self._max_pending_bytes = max_pending_bytes
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._changes: dict[RowName, _PendingChange] = {}
        self._changes_nbytes = 0
        self._touches: dict[RowName, int] = {}
        self._touches_written_ns = wall_clock()
        self._is_closed = threading.Event()
        self._is_scheduled = self._is_closing = self._is_failing = self._is_too_much = False
        loaded = self._open()
        # Times increase strictly, so that they tell the order of changes even if the clock does not.
        self._latest_ns = max((row.used_ns for row in loaded), default=0)
        self._loaded: dict[bytes, list[StoredRow]] = {}
        for row in loaded:
            self._loaded.setdefault(row.name.table, []).append(row)
        self.metrics.loaded = len(loaded)
        self.metrics.nbytes = self._file.nbytes

    def table(self, name: str) -> DatabaseTable:
        """Return a table with the rows that the file has of it. Call this once for each table."""
        table = name.encode()
        now_ns = self._wall_clock()
        rows = [
            DatabaseRow(
                row.name.key, row.value, _seconds(now_ns - row.written_ns), _seconds(now_ns - row.used_ns)
            )
            for row in self._loaded.pop(table, ())
        ]
        return DatabaseTable(self, table, rows)

    def close(self, patience_s: float = 0) -> bool:
        """Make its thread write everything and close the file. Call this before the thread's `close`.

        Changes that are noted later are lost. Returns False if the file is not closed after `patience_s`;
        until then nobody can open it again.
        """
        with self._lock:
            self._is_closing = True
        return self._thread.submit(self._end) and self._is_closed.wait(patience_s)

    def note_change(self, name: RowName, value: bytes | None) -> None:
        """Note that a row has a new value, or is deleted."""
        with self._lock:
            if not self.metrics.is_on:
                return
            self._touches.pop(name, None)
            self._add_change(name, _PendingChange(self._next_ns(), value))
            if self._changes_nbytes > self._max_pending_bytes:
                self._is_too_much = True
                self._forget_pending()
            self._schedule(self._write_after_s)

    def note_use(self, name: RowName, idle_s: float) -> None:
        """Note that a row was used `idle_s` seconds ago."""
        with self._lock:
            if self.metrics.is_on:
                idle_ns = round(idle_s * 1e9)
                self._touches[name] = self._wall_clock() - idle_ns if idle_ns else self._next_ns()

    def _open(self) -> list[StoredRow]:
        """Open the file; one that is unusable is deleted first."""
        try:
            try:
                rows = self._file.open()
            except UnusableFile as problem:
                self._tell(f"{self._name} is {problem}. It is deleted, and what it held is forgotten.")
                self.metrics.resets += 1
                self._file.delete()
                rows = self._file.open()
        except (OSError, sqlite3.Error, UnusableFile) as error:
            self._tell(f"{self._name} cannot be used ({error}). Nothing is kept for the next start.")
            return []
        self.metrics.is_on = True
        return rows

    def _next_ns(self) -> int:
        self._latest_ns = max(self._latest_ns + 1, self._wall_clock())
        return self._latest_ns

    def _schedule(self, after_s: float) -> None:
        if not self._is_scheduled:
            self._is_scheduled = self._thread.submit(self._write, after_s=after_s)

    def _add_change(self, name: RowName, change: _PendingChange) -> None:
        self._changes_nbytes += _nbytes(name, change)
        if (before := self._changes.pop(name, None)) is not None:
            self._changes_nbytes -= _nbytes(name, before)
        self._changes[name] = change

    def _forget_pending(self) -> None:
        """Give up keeping anything. Its thread deletes the file, which would be of an earlier time."""
        self.metrics.is_on = False
        self._changes, self._changes_nbytes, self._touches = {}, 0, {}

    # ------------------------------------------------------------------------------------ on its own thread

    def _write(self) -> None:
        with self._lock:
            self._is_scheduled = False
        if self._is_too_much:
            self._abandon("there are too many changes to keep in memory")
        else:
            self._write_pending()

    def _write_pending(self) -> None:
        changes, touches = self._take()
        if not changes and not touches:
            return
        try:
            self._file.write(
                [
                    StoredRow(name, change.at_ns, change.at_ns, change.value)
                    for name, change in changes.items()
                    if change.value is not None
                ],
                touches.items(),
                [name for name, change in changes.items() if change.value is None],
            )
        except sqlite3.OperationalError as error:
            self._try_again(changes, touches, error)
        except (sqlite3.DatabaseError, MemoryError) as error:
            self._abandon(str(error) or "out of memory")
        else:
            self._is_failing = False
            self.metrics.written += len(changes) + len(touches)
            self.metrics.nbytes = self._file.nbytes

    def _take(self) -> tuple[dict[RowName, _PendingChange], dict[RowName, int]]:
        """Take the changes, and the touches if it is time for them."""
        with self._lock:
            changes, self._changes, self._changes_nbytes = self._changes, {}, 0
            now_ns = self._wall_clock()
            if not self._is_closing and now_ns - self._touches_written_ns < _TOUCHES_EVERY_NS:
                return changes, {}
            self._touches_written_ns = now_ns
            touches, self._touches = self._touches, {}
            return changes, touches

    def _try_again(
        self, changes: dict[RowName, _PendingChange], touches: dict[RowName, int], error: Exception
    ) -> None:
        """Put back what could not be written; what was noted since then is newer."""
        self.metrics.failures += 1
        if not self._is_failing:
            self._tell(f"{self._name} cannot be written ({error}). It is tried again until the server ends.")
        self._is_failing = True
        with self._lock:
            if not self.metrics.is_on:
                return
            self._touches = {name: at for name, at in touches.items() if name not in self._changes} | (
                self._touches
            )
            for name, change in changes.items():
                if name not in self._changes:
                    self._add_change(name, change)
            self._schedule(_RETRY_AFTER_S)

    def _abandon(self, reason: str) -> None:
        with self._lock:
            self._is_too_much = False
            self._forget_pending()
        self._file.close()
        try:
            self._file.delete()
        except OSError as error:
            reason = f"{reason}; {error}"
        self._tell(f"{self._name} is given up ({reason}). Nothing is kept for the next start.")

    def _end(self) -> None:
        self._write()
        if self._changes:
            self._tell(f"{self._name} could not be written: {len(self._changes)} changes are lost.")
        with self._lock:
            self._forget_pending()
        self._file.close()
        self._is_closed.set()


class DatabaseTable:
    """The rows of one store. Changes never wait for the disk. Safe to use from any thread.

    Args:
        database: None keeps nothing for the next process.
        rows: of the last process.
    """

    def __init__(
        self, database: Database | None, name: bytes = b"", rows: Sequence[DatabaseRow] = ()
    ) -> None:
        self._database = database
        self._name = name
        self._rows = rows

    def rows(self) -> Sequence[DatabaseRow]:
        """Return the rows of the last process, the least recently used first. A second call returns none."""
        rows, self._rows = self._rows, ()
        return rows

    def read[Meaning](
        self, decode: Callable[[DatabaseRow], Meaning]
    ) -> Iterator[tuple[DatabaseRow, Meaning]]:
        """Yield these rows with what they mean. One that cannot be decoded is rejected."""
        for row in self.rows():
            try:
                meaning = decode(row)
            except UNREADABLE:
                self.reject(row.key)
            else:
                yield row, meaning

    def put(self, key: bytes, value: bytes = b"") -> None:
        """Write a row, or write it anew."""
        self._change(key, value)

    def touch(self, key: bytes, *, idle_s: float = 0) -> None:
        """Mark a row as used `idle_s` seconds ago. If the process is killed, that may be forgotten."""
        if self._database:
            self._database.note_use(RowName(self._name, key), idle_s)

    def delete(self, key: bytes) -> None:
        """Delete a row, whether or not it exists."""
        self._change(key, None)

    def reject(self, key: bytes) -> None:
        """Delete a row that was read but cannot be used."""
        if self._database:
            self._database.metrics.rejected += 1
        self.delete(key)

    def _change(self, key: bytes, value: bytes | None) -> None:
        if self._database:
            self._database.note_change(RowName(self._name, key), value)


NO_TABLE = DatabaseTable(None)
"""Of a store that ends with its process."""


def _nbytes(name: RowName, change: _PendingChange) -> int:
    return _CHANGE_BYTES + len(name.key) + len(change.value or b"")


def _seconds(ns: int) -> float:
    """Return a time span in seconds; 0 if the clock was set back."""
    return max(ns, 0) / 1e9
