"""Work that another thread wants done on the engine thread, between two steps."""

import queue
from collections.abc import Callable
from typing import Any

from start_llm.core.errors import InternalError, RequestError
from start_llm.core.standard_error import print_traceback
from start_llm.core.thread_owners import ENGINE, REQUEST, owned_by


class EngineTask:
    """Work and its outcome. The engine thread does it; one other thread waits.

    Args:
        name: what it is, in words.
        work: returns what the waiting thread wants, or raises a `RequestError` for it.

    Attributes:
        patience_s: seconds for which it makes way for requests that somebody waits for; 0: none.
        yields_until: seconds on the engine's clock until which it makes way for requests.
    """

    def __init__(self, name: str, work: Callable[[], Any], patience_s: float = 0.0) -> None:
        self._name = name
        self._work = work
        self.patience_s = patience_s
        self.yields_until = 0.0
        self._outcome: queue.SimpleQueue[tuple[Any, RequestError | None]] = queue.SimpleQueue()

    @owned_by(ENGINE)
    def run(self) -> None:
        """Do the work. Nothing is raised here: requests that run have no part in it."""
        try:
            self._outcome.put((self._work(), None))
        except RequestError as error:
            self._outcome.put((None, error))
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to the thread that waits
            print_traceback()
            message = f"{self._name}: {type(error).__name__}: {error}"
            self._outcome.put((None, InternalError(message)))

    @owned_by(REQUEST)
    def wait(self, timeout_s: float) -> Any:
        """Return what the work returned.

        Raises:
            queue.Empty: it has not been done after `timeout_s` seconds.
            RequestError: the work raised it, or another exception.
        """
        result, error = self._outcome.get(timeout=timeout_s)
        if error:
            raise error
        return result
