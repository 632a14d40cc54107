"""Which conversations were ever computed, so that it can be said what a prompt had to cost."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from start_llm.core.canonical import CanonicalKey

_MOST_KEYS = 32_000


class SeenConversations:
    """Keys. Beyond `most_keys` those noted least recently are forgotten. Safe to use from any thread."""

    def __init__(self, most_keys: int = _MOST_KEYS) -> None:
        self._most_keys = most_keys
        self._keys: dict[CanonicalKey, None] = {}
        self._lock = threading.Lock()

    def note(self, *keys: CanonicalKey) -> None:
        with self._lock:
            for key in keys:
                self._keys.pop(key, None)
                self._keys[key] = None
            while len(self._keys) > self._most_keys:
                del self._keys[next(iter(self._keys))]

    def depth(self, keys: Sequence[CanonicalKey]) -> int:
        """Messages of the longest prefix that was noted.

        Args:
            keys: one for each prefix.
        """
        with self._lock:
            return next((depth for depth in range(len(keys), 0, -1) if keys[depth - 1] in self._keys), 0)
