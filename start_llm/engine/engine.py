"""Start, feed and stop the engine thread: the engine's interface for all other threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress

import mlx.core as mx
from mlx_lm.generate import generation_stream

from start_llm.core.engine_request import EngineRequest
from start_llm.core.errors import EngineDied, ModelError, Overloaded, StartLLMError
from start_llm.core.events import Failed, Restored
from start_llm.engine.cache_probe import CacheProbe
from start_llm.engine.generation import Generation
from start_llm.engine.inbox import DiskNews, Inbox, StopRequest
from start_llm.engine.loop import STOPPING, EngineLoop
from start_llm.engine.resources import EngineResources
from start_llm.telemetry.metrics import EngineMetrics

_CLIENT_CHECK_INTERVAL_S = 0.5


class Engine:
    """The engine thread's owner. Safe to use from any thread.

    Args:
        assemble: loads the model. Called on the engine thread, which owns every array from then on.
        metrics: written by the engine thread only.
        max_waiting: number of requests that may wait in the queue.
    """

    def __init__(
        self, assemble: Callable[[], EngineResources], metrics: EngineMetrics, *, max_waiting: int
    ) -> None:
        self._max_waiting = max_waiting
        self._assemble = assemble
        self._metrics = metrics
        self._inbox = Inbox()
        self._ready = threading.Event()
        self._startup_error: StartLLMError | None = ModelError(
            "Loading failed; the traceback above says where."
        )
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread and wait until the model is loaded.

        Raises:
            StartLLMError: `assemble` raised it, or the thread died of another exception.
        """
        self._thread.start()
        self._ready.wait()
        if self._startup_error:
            self._thread.join()  # it still has its streams to clear
            raise self._startup_error

    def submit(self, request: EngineRequest) -> Generation:
        """Queue a request. It fails at once if the engine is stopping.

        Raises:
            Overloaded: too many requests are waiting.
            EngineDied: the engine has stopped.
        """
        if not self.is_alive():
            raise EngineDied("The engine has stopped.")
        if self._metrics.waiting + len(self._inbox) >= self._max_waiting:
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
        look = CacheProbe(request)
        self._inbox.put(look)
        while self.is_alive():
            with suppress(queue.Empty):
                restored = look.wait(_CLIENT_CHECK_INTERVAL_S)
                if restored is None:
                    break
                return restored
        raise EngineDied("The engine cannot tell what it has of this prompt.")

    def note_disk(self) -> None:
        """Tell the engine that the disk thread has written or read something."""
        self._inbox.put(DiskNews())

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, timeout_s: float, flush_s: float = 0.0) -> bool:
        """Fail all requests, write what is cached to the disk and stop the thread.

        Returns False if the thread still runs after both times.

        Args:
            flush_s: seconds for writing; as many as are needed are taken.
        """
        self._inbox.put(StopRequest(flush_s))
        self._thread.join(timeout_s + flush_s)
        return not self.is_alive()

    def _run(self) -> None:
        try:
            # One stream for prefill and decode: mlx_lm's batches run on this one.
            with mx.stream(generation_stream):
                self._load_and_serve()
        finally:
            # Without this the process aborts when it ends: MLX's stream threads would be joinable (lesson 4).
            mx.clear_streams()

    def _load_and_serve(self) -> None:
        try:
            loop = EngineLoop(self._assemble(), self._inbox, self._metrics)
            self._startup_error = None
        except StartLLMError as error:
            self._startup_error = error
            return
        finally:
            self._ready.set()
        loop.run()
