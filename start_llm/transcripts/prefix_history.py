"""Remembers which prefixes were ever computed, to tell which tokens of a prompt had to be computed."""

import threading
from collections.abc import Sequence

from start_llm.core.canonical import CanonicalKey
from start_llm.storage.database import NO_TABLE, DatabaseTable

_MAX_KEYS = 32_000


class PrefixHistory:
    """The `max_keys` keys that were noted last. Safe to use from any thread.

    Args:
        table: keeps them for the next process.
    """

    def __init__(self, max_keys: int = _MAX_KEYS, *, table: DatabaseTable = NO_TABLE) -> None:
        self._max_keys = max_keys
        self._table = table
        self._keys: dict[CanonicalKey, None] = {CanonicalKey(row.key): None for row in table.rows()}
        self._lock = threading.Lock()
        self._forget_some()

    def note(self, *keys: CanonicalKey) -> None:
        with self._lock:
            for key in keys:
                is_known = key in self._keys
                self._keys.pop(key, None)
                self._keys[key] = None
                (self._table.touch if is_known else self._table.put)(key.digest)
            self._forget_some()

    def _forget_some(self) -> None:
        while len(self._keys) > self._max_keys:
            oldest = next(iter(self._keys))
            del self._keys[oldest]
            self._table.delete(oldest.digest)

    def depth(self, keys: Sequence[CanonicalKey]) -> int:
        """Return the number of messages in the longest prefix that was noted.

        Args:
            keys: the key of each prefix.
        """
        with self._lock:
            return next((depth for depth in range(len(keys), 0, -1) if keys[depth - 1] in self._keys), 0)
