"""A store of limited size that drops what was not used for the longest time."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable


class RecentlyUsed[K: Hashable, V]:
    """Values by key. Safe to use from any thread.

    Args:
        most: the limit for the sizes of all values together. A value that is larger is not kept.
        size_of: returns the size of a value, which never changes.
    """

    def __init__(self, most: int, size_of: Callable[[V], int]) -> None:
        self._most = most
        self._size_of = size_of
        self._values = OrderedDict[K, V]()
        self._size = 0
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """The sizes of all values together."""
        return self._size

    def __contains__(self, key: K) -> bool:
        """Return whether a value is kept. This does not count as its use."""
        with self._lock:
            return key in self._values

    def get(self, key: K) -> V | None:
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key]

    def put(self, key: K, value: V) -> None:
        """Keep a value, in place of one with the same key. Others are dropped for it."""
        with self._lock:
            if key in self._values:
                self._size -= self._size_of(self._values.pop(key))
            if self._size_of(value) > self._most:
                return
            self._values[key] = value
            self._size += self._size_of(value)
            while self._size > self._most:
                self._size -= self._size_of(self._values.popitem(last=False)[1])
