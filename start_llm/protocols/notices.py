"""What the person at the terminal should know of requests, each thing once."""

from __future__ import annotations

import threading
from collections.abc import Callable

_MOST = 100
_LONGEST = 200


def _nobody(line: str) -> None:
    del line


class Notices:
    """Tells a text once. Safe to use from any thread.

    Args:
        say: writes a line.
    """

    def __init__(self, say: Callable[[str], object] = _nobody) -> None:
        self._say = say
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def tell(self, text: str) -> None:
        """The text may have words of a client in it: nothing in it moves a cursor, and it is one of few."""
        line = "".join(char if char.isprintable() else "?" for char in text[:_LONGEST])
        with self._lock:
            if line in self._told or len(self._told) >= _MOST:
                return
            self._told.add(line)
        self._say(line)
