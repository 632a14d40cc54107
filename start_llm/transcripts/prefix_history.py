"""Remembers which prefixes were ever computed, to tell which tokens of a prompt had to be computed."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from start_llm.core.canonical import CanonicalKey

_MAX_KEYS = 32_000


class PrefixHistory:
    """The `max_keys` keys that were noted last. Safe to use from any thread."""

    def __init__(self, max_keys: int = _MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._keys: dict[CanonicalKey, None] = {}
        self._lock = threading.Lock()

    def note(self, *keys: CanonicalKey) -> None:
        with self._lock:
            for key in keys:
                self._keys.pop(key, None)
                self._keys[key] = None
            while len(self._keys) > self._max_keys:
                del self._keys[next(iter(self._keys))]

    def depth(self, keys: Sequence[CanonicalKey]) -> int:
        """Return the number of messages in the longest prefix that was noted.

        Args:
            keys: the key of each prefix.
        """
        with self._lock:
            return next((depth for depth in range(len(keys), 0, -1) if keys[depth - 1] in self._keys), 0)
