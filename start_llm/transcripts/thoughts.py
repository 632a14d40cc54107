"""Thoughts by the conversation that they were had in, for clients that do not send them back.

The key is the whole conversation up to the reply, not the reply alone: "Done." was thought of in many ways.
Kept beside the session turn store, since a thought is small and its tokens may be gone.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from start_llm.core.canonical import CanonicalKey

_ENTRY_BYTES = 200
"""About what an entry takes beside its text."""


class ThoughtStore:
    """Safe to use from any thread.

    Args:
        most_bytes: what was used least recently is forgotten first.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._thoughts: OrderedDict[CanonicalKey, str] = OrderedDict()
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def keep(self, key: CanonicalKey, thought: str) -> None:
        """Remember the thought of the reply that ends this conversation; a newer one takes its place."""
        with self._lock:
            self._forget(key)
            self._thoughts[key] = thought
            self._nbytes += _size(thought)
            while self._nbytes > self._most_bytes and self._thoughts:
                self._forget(next(iter(self._thoughts)))

    def get(self, key: CanonicalKey) -> str | None:
        """The thought that was kept last; None if none is known."""
        with self._lock:
            if key in self._thoughts:
                self._thoughts.move_to_end(key)
            return self._thoughts.get(key)

    def _forget(self, key: CanonicalKey) -> None:
        thought = self._thoughts.pop(key, None)
        if thought is not None:
            self._nbytes -= _size(thought)


def _size(thought: str) -> int:
    return _ENTRY_BYTES + len(thought.encode(errors="surrogatepass"))
