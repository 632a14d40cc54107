"""Prints notices about requests in the terminal, each text once."""

import threading
from collections.abc import Callable

_MOST = 100
_LONGEST = 200


class Notices:
    """Prints each text once. Thread-safe.

    Args:
        say: writes a line.
    """

    def __init__(self, say: Callable[[str], object] = lambda _: None) -> None:
        self._say = say
        self._printed: set[str] = set()
        self._lock = threading.Lock()

    def tell(self, text: str) -> None:
        """Print a text unless it was printed before.

        The text may contain a client's words, so control characters are replaced, and length and number are
        limited.
        """
        line = "".join(char if char.isprintable() else "?" for char in text[:_LONGEST])
        with self._lock:
            if line in self._printed or len(self._printed) >= _MOST:
                return
            self._printed.add(line)
        self._say(line)
