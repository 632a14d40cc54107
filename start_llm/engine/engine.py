"""The engine as the rest of the server sees it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.generate import generation_stream

from start_llm.core.errors import EngineDied, ModelError, Overloaded, StartLLMError
from start_llm.core.events import Failed, Restored
from start_llm.core.job import Job
from start_llm.engine.generation import Generation
from start_llm.engine.inbox import Inbox
from start_llm.engine.look import Look
from start_llm.engine.loop import STOPPING, EngineLoop
from start_llm.engine.machinery import Machinery
from start_llm.telemetry.metrics import EngineMetrics

_BETWEEN_LOOKS_S = 0.5


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of the engine.

    Attributes:
        most_waiting: requests that may wait for their turn.
    """

    most_waiting: int


class Engine:
    """Starts, feeds and ends the engine thread. Safe to use from any thread.

    Args:
        assemble: loads the model; called on the engine thread, which owns every array from then on.
        metrics: written by the engine thread alone.
    """

    def __init__(
        self, config: EngineConfig, assemble: Callable[[], Machinery], metrics: EngineMetrics
    ) -> None:
        self._config = config
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
            StartLLMError: what `assemble` raised, or that the thread died of something else.
        """
        self._thread.start()
        self._ready.wait()
        if self._startup_error:
            self._thread.join()  # it still has its streams to clear
            raise self._startup_error

    def submit(self, job: Job) -> Generation:
        """Queue a job.

        Raises:
            Overloaded: too many requests wait already.
            EngineDied: the engine has stopped.
        """
        if not self.is_alive():
            raise EngineDied("The engine has stopped.")
        if self._metrics.waiting + len(self._inbox) >= self._config.most_waiting:
            raise Overloaded(
                f"{self._config.most_waiting} requests are waiting already; try again in a moment."
            )
        generation = Generation(job)
        if not self._inbox.put(generation):
            generation.emit(Failed(STOPPING))
        return generation

    def peek(self, job: Job) -> Restored:
        """What the cache would restore of a job's prompt if its turn came now. Computes nothing.

        Raises:
            EngineDied: the engine has stopped, or failed to tell.
        """
        look = Look(job)
        self._inbox.put(look)
        while self.is_alive():
            with suppress(queue.Empty):
                restored = look.wait(_BETWEEN_LOOKS_S)
                if restored is None:
                    break
                return restored
        raise EngineDied("The engine cannot tell what it has of this prompt.")

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, timeout_s: float) -> bool:
        """Fail what is running and end the thread. False if it is still busy after `timeout_s` seconds."""
        self._inbox.put(None)
        self._thread.join(timeout_s)
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
