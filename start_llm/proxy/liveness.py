"""Ask the proxy at intervals whether it still answers."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Generator
from contextlib import contextmanager

_ATTEMPTS = 2
"""One alone might have met a moment in which a large body was parsed."""


class Probe:
    """Watches a proxy that has answered before, on a thread of its own.

    Args:
        port: of the proxy.
        every_s: seconds between two requests, and seconds in which each has to be answered.
    """

    def __init__(self, port: int, every_s: float) -> None:
        self._port = port
        self._every_s = every_s
        self._ended = threading.Event()
        self._hangs = threading.Event()

    @property
    def hangs(self) -> bool:
        """True once the proxy has left several requests in a row unanswered."""
        return self._hangs.is_set()

    @contextmanager
    def watching(self) -> Generator[None]:
        """Ask while the block runs."""
        threading.Thread(target=self._watch, name="probe of the proxy", daemon=True).start()
        try:
            yield
        finally:
            self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(self._every_s):
            if not any(answers(self._port, self._every_s) for _ in range(_ATTEMPTS)):
                self._hangs.set()
                return


def answers(port: int, within_s: float) -> bool:
    """Return True if the proxy on this port answers a request, which it does not pass on."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=within_s)
    try:
        connection.request("GET", "/health/liveliness")
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True
