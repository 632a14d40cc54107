"""Record which thread writes which attribute of shared records, and which locks it holds meanwhile."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self, cast
from unittest.mock import patch

_Lock, _RLock = threading.Lock, threading.RLock


class Locks(threading.local):
    """The locks that this thread holds, once for each time that it has taken them."""

    def __init__(self) -> None:
        self.held: list[object] = []


_locks = Locks()


class KnownLock:
    """A lock that tells `_locks` who holds it. What `threading.Condition` needs of one is there too."""

    def __init__(self, lock: Any = None) -> None:
        self._lock: Any = _Lock() if lock is None else lock

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        is_taken = self._lock.acquire(blocking, timeout)
        if is_taken:
            _locks.held.append(self)
        return bool(is_taken)

    def release(self) -> None:
        self._lock.release()
        if self in _locks.held:  # another thread may release a lock that is none of a `with`
            _locks.held.remove(self)

    def locked(self) -> bool:
        return bool(self._lock.locked())

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class KnownRLock(KnownLock):
    def __init__(self) -> None:
        super().__init__(_RLock())

    def _is_owned(self) -> bool:
        return bool(self._lock._is_owned())

    def _release_save(self) -> Any:
        count = _locks.held.count(self)
        _locks.held[:] = [lock for lock in _locks.held if lock is not self]
        return self._lock._release_save(), count

    def _acquire_restore(self, saved: Any) -> None:
        state, count = saved
        self._lock._acquire_restore(state)
        _locks.held.extend([self] * count)


@dataclass
class Writes:
    """Of one attribute of one record.

    Attributes:
        common: the locks that were held at each write; None before the first.
    """

    threads: set[str] = field(default_factory=set[str])
    common: set[int] | None = None


class Recorder:
    """Notes writes to attributes, and to the counters in them, from `begin` on.

    The first write of an attribute makes the record, and nobody else has it yet.
    """

    def __init__(self) -> None:
        self._records: dict[int, object] = {}  # kept, so that no other record gets the number of one
        self._writes: dict[tuple[int, str, str], Writes] = {}
        self._is_on = False
        self._guard = _Lock()

    def begin(self) -> None:
        self._is_on = True

    def note(self, record: object, name: str) -> None:
        thread, held = threading.current_thread().name, {id(lock) for lock in _locks.held}
        key = id(record), type(record).__name__, name
        with self._guard:
            self._records.setdefault(id(record), record)
            is_new = key not in self._writes
            writes = self._writes.setdefault(key, Writes())
            if self._is_on and not is_new:
                writes.threads.add(thread)
                writes.common = held if writes.common is None else writes.common & held

    @property
    def written(self) -> set[str]:
        """The attributes that were written, such as `DiskMetrics.lost`."""
        return {f"{kind}.{name}" for (_, kind, name), entry in self._writes.items() if entry.threads}

    @property
    def several(self) -> set[str]:
        """The attributes that several threads have written, under a lock or not."""
        return {f"{kind}.{name}" for (_, kind, name), entry in self._writes.items() if len(entry.threads) > 1}

    @property
    def races(self) -> dict[str, list[str]]:
        """The attributes that several threads have written without a lock that all held, and who has."""
        return {
            f"{kind}.{name}": sorted(entry.threads)
            for (_, kind, name), entry in self._writes.items()
            if len(entry.threads) > 1 and not entry.common
        }


class KnownCounter(Counter[Any]):
    """A counter that is an attribute of a record."""

    owner: tuple[Recorder, object, str] | None = None

    def __setitem__(self, key: Any, value: int) -> None:
        super().__setitem__(key, value)
        if self.owner:
            recorder, record, name = self.owner
            recorder.note(record, name)


@contextmanager
def recording(kinds: Iterable[type]) -> Generator[Recorder]:
    """Record writes to what is made of these classes inside of the block. It has to make the locks too."""
    recorder = Recorder()

    def set_attribute(record: Any, name: str, value: Any) -> None:
        if isinstance(value, Counter) and not isinstance(value, KnownCounter):
            value = KnownCounter(value)
            value.owner = recorder, record, name
        elif type(value) is type(_Lock()):
            value = KnownLock()
        object.__setattr__(record, name, value)
        recorder.note(record, name)

    patches = [patch.object(kind, "__setattr__", set_attribute) for kind in kinds]
    locks = patch.object(threading, "Lock", KnownLock), patch.object(threading, "RLock", KnownRLock)
    for patcher in cast("list[Any]", [*patches, *locks]):
        patcher.start()
    try:
        yield recorder
    finally:
        for patcher in cast("list[Any]", [*patches, *locks]):
            patcher.stop()
