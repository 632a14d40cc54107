"""The engine of one model: its interface for all other threads."""

import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from start_llm.core.engine_request import EngineRequest
from start_llm.core.errors import EngineDied, ModelError, Overloaded, StartLLMError
from start_llm.core.events import Failed, Restored
from start_llm.core.standard_error import print_traceback
from start_llm.engine.cache_probe import CacheProbe
from start_llm.engine.engine_task import EngineTask
from start_llm.engine.engine_thread import EngineThread
from start_llm.engine.generation import Generation
from start_llm.engine.inbox import DiskNews, Inbox, MemoryShare, StopRequest
from start_llm.engine.loop import STOPPING, EngineLoop
from start_llm.engine.resources import EngineResources
from start_llm.telemetry.metrics import EngineMetrics

_CLIENT_CHECK_INTERVAL_S = 0.5


class Engine:
    """Feeds the loop of one model, which runs on an engine thread. Safe to use from any thread.

    Args:
        assemble: loads the model. Called on the engine thread, which owns every array from then on.
        metrics: written by the engine thread only.
        max_waiting: number of requests that may wait in the queue.
        thread: runs other models' loops too, and is running. None: a thread for this engine alone.
    """

    def __init__(
        self,
        assemble: Callable[[], EngineResources],
        metrics: EngineMetrics,
        *,
        max_waiting: int,
        thread: EngineThread | None = None,
    ) -> None:
        self._max_waiting = max_waiting
        self._assemble = assemble
        self._metrics = metrics
        self._has_own_thread = thread is None
        self._thread = thread or EngineThread()
        self._inbox = Inbox(self._thread.work_event)
        self._ready, self._ended = threading.Event(), threading.Event()
        self._startup_error: StartLLMError | None = ModelError("Loading failed.")

    def start(self) -> None:
        """Wait until the model is loaded.

        Raises:
            StartLLMError: `assemble` raised it, or another exception, whose traceback the thread prints.
        """
        if self._has_own_thread:
            self._thread.start()
        if not self._thread.submit(self._load):
            raise EngineDied(STOPPING)
        self._ready.wait()
        if self._startup_error:
            if self._has_own_thread:
                self._thread.close()  # it still has its streams to clear
            raise self._startup_error

    def submit(self, request: EngineRequest) -> Generation:
        """Queue a request. It fails at once if the engine is stopping.

        Raises:
            Overloaded: too many requests are waiting.
            EngineDied: the engine has stopped.
        """
        if not self.is_alive():
            raise EngineDied("The engine has stopped.")
        if self._metrics.waiting + self._inbox.requests >= self._max_waiting:
            raise Overloaded(f"{self._max_waiting} requests are waiting already; try again in a moment.")
        generation = Generation(request)
        if not self._inbox.put(generation):
            generation.emit(Failed(STOPPING))
        return generation

    def peek(self, request: EngineRequest) -> Restored:
        """Return what the cache would restore of the request's prompt if it started now. Computes nothing.

        Raises:
            EngineDied: the engine has stopped, or the lookup failed.
        """
        probe = CacheProbe(request)
        self._inbox.put(probe)
        while self.is_alive():
            with suppress(queue.Empty):
                restored = probe.wait(_CLIENT_CHECK_INTERVAL_S)
                if restored is None:
                    break
                return restored
        raise EngineDied("The engine cannot tell what it has of this prompt.")

    def run[Result](self, name: str, work: Callable[[], Result], patience_s: float = 0.0) -> Result:
        """Do some work on the engine thread, between two steps, and return what it returns.

        Args:
            name: what it is, in words.
            patience_s: seconds for which requests that somebody waits for go first.

        Raises:
            RequestError: the work raised it.
            EngineDied: the engine has stopped.
        """
        task = EngineTask(name, work, patience_s)
        self._inbox.put(task)
        while self.is_alive():
            with suppress(queue.Empty):
                return task.wait(_CLIENT_CHECK_INTERVAL_S)
        raise EngineDied(STOPPING)

    def share_memory(self, usable_bytes: int, cache_bytes: int) -> None:
        """Tell the engine how much memory it may use from now on; see `inbox.MemoryShare`."""
        self._inbox.put(MemoryShare(usable_bytes, cache_bytes))

    def note_disk(self) -> None:
        """Tell the engine that the disk thread has written or read something."""
        self._inbox.put(DiskNews())

    def is_alive(self) -> bool:
        return not self._ended.is_set() and self._thread.is_alive()

    def stop(self, timeout_s: float, flush_s: float = 0.0) -> bool:
        """Fail all requests, write what is cached to the disk and leave the thread.

        Returns False if the loop still runs after both times.

        Args:
            flush_s: seconds for writing; as many as are needed are taken.
        """
        self._inbox.put(StopRequest(flush_s))
        if self._has_own_thread:
            return self._thread.close(timeout_s + flush_s)
        return self._ended.wait(timeout_s + flush_s)

    def _load(self) -> None:
        try:
            loop = EngineLoop(self._assemble(), self._inbox, self._metrics)
            self._thread.add(loop, on_end=self._ended.set)
            self._startup_error = None
        except StartLLMError as error:
            self._startup_error = error
        except Exception as error:  # noqa: BLE001 - whatever it is, the message of the error leads here
            print_traceback()
            self._startup_error = ModelError(
                f"Loading failed: {type(error).__name__}: {error} (the traceback was printed)"
            )
        finally:
            if self._startup_error:
                self._ended.set()
            self._ready.set()
