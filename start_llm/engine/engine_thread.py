"""The thread that owns all MLX arrays, on which the loops of all loaded models take turns."""

import gc
import queue
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.generate import generation_stream

from start_llm.core.standard_error import print_traceback
from start_llm.core.thread_owners import ENGINE, take_role
from start_llm.engine.loop import EngineLoop

type Job = Callable[[], None]

_COLLECT_S = 30.0
_TURN_S = 0.5
"""Seconds for which a model computes while others have work too."""


@dataclass(eq=False, slots=True)
class _LoopEntry:
    """A loop on the thread.

    Attributes:
        on_end: called when it has ended.
        turn_ended: when its last turn was over.
        due: when it is to make a step even if nothing comes in, in seconds of the thread's clock.
    """

    loop: EngineLoop
    on_end: Callable[[], None]
    turn_ended: float
    due: float | None = None

    def is_ready(self, now: float) -> bool:
        """Return whether there is work, or what it waited for is due."""
        rest_s = self.loop.rest_s
        if rest_s is None:
            self.due = None
        elif self.due is None:
            self.due = now + rest_s
        return self.due is not None and (now >= self.due or rest_s == 0)


class EngineThread:
    """Runs loops and jobs. While several loops have work, each computes for half a second in its turn.

    A loop that has only prompts to read for which nobody waits makes way for all others. A loop that is not
    asked to compute keeps all that it has: its sequences go on where they were. Jobs, such as loading a
    model, come before the next step.

    Args:
        clock: returns seconds.

    Attributes:
        work_event: set when there may be work; inboxes set it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.work_event = threading.Event()
        self._clock = clock
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._entries: list[_LoopEntry] = []
        self._current: _LoopEntry | None = None
        self._turn_began = 0.0
        self._is_closing = False
        self._closing = threading.Lock()  # a job is either refused, or there before the thread may end
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, job: Job) -> bool:
        """Run a job on the thread. Returns False, and never runs it, if the thread is closing."""
        with self._closing:
            if self._is_closing:
                return False
            self._jobs.put(job)
        self.work_event.set()
        return True

    def collect(self) -> None:
        """Free the memory of models that nobody refers to any more.

        Objects that were frozen after the start are examined too (`gc.freeze`).
        """
        done = threading.Event()

        def collect() -> None:
            gc.unfreeze()
            gc.collect()
            mx.clear_cache()
            gc.freeze()
            done.set()

        if self.submit(collect):
            done.wait(_COLLECT_S)

    def add(self, loop: EngineLoop, on_end: Callable[[], None]) -> None:
        """Run this loop until it is asked to stop. Only for jobs."""
        self._entries.append(_LoopEntry(loop, on_end, self._clock()))

    def close(self, timeout_s: float | None = None) -> bool:
        """End the thread once its loops, which were asked to stop, have ended. False if it still runs."""
        with self._closing:
            self._is_closing = True
        self.work_event.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self.is_alive()

    def _run(self) -> None:
        take_role(ENGINE)
        try:
            # One stream for prefill and decode: mlx_lm's batches run on this one.
            with mx.stream(generation_stream):
                while self._has_work or not self._is_closing:
                    self._go_on()
        finally:
            # Without this the process aborts when it ends: MLX's stream threads would be joinable (lesson 4).
            mx.clear_streams()

    def _go_on(self) -> None:
        """Run the jobs that are there and a step of the loop whose turn it is, or wait for work."""
        self.work_event.clear()
        self._run_jobs()
        now, awaited, yielding = self._clock(), list[_LoopEntry](), list[_LoopEntry]()
        for entry in list(self._entries):
            with self._ending_on_failure(entry):
                if entry.is_ready(now):
                    (yielding if entry.loop.yields else awaited).append(entry)
        chosen = self._choose(awaited or yielding, now)
        if chosen:
            self._step(chosen)
        elif self._has_work or not self._is_closing:
            due = min((entry.due for entry in self._entries if entry.due is not None), default=None)
            self.work_event.wait(None if due is None else due - now)

    @property
    def _has_work(self) -> bool:
        return bool(self._entries) or not self._jobs.empty()

    def _run_jobs(self) -> None:
        with suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                try:
                    job()
                except Exception:  # noqa: BLE001 - a model that cannot be loaded must not end the others
                    print_traceback()

    def _choose(self, ready: list[_LoopEntry], now: float) -> _LoopEntry | None:
        """Return the loop whose turn it is: of several that are ready, the one that has waited longest."""
        current = self._current
        if current in ready and (len(ready) == 1 or now - self._turn_began < _TURN_S):
            return current
        if current:
            current.turn_ended = now
            current.loop.end_turn()
        others = [entry for entry in ready if entry is not current]
        self._current = min(others, key=lambda entry: entry.turn_ended, default=None)
        self._turn_began = now
        return self._current

    def _step(self, entry: _LoopEntry) -> None:
        entry.due = None
        with self._ending_on_failure(entry):
            entry.loop.step()
            if entry.loop.is_stopping:
                self._end(entry, entry.loop.finish)

    @contextmanager
    def _ending_on_failure(self, entry: _LoopEntry) -> Generator[None]:
        """If the block raises, the loop ends, and all its requests fail; the others go on."""
        try:
            yield
        except BaseException:  # noqa: BLE001 - whatever it is, nobody may wait for this loop any more
            print_traceback()
            self._end(entry, entry.loop.fail_the_rest)

    def _end(self, entry: _LoopEntry, last_act: Callable[[], None]) -> None:
        self._entries.remove(entry)
        self._current = None
        try:
            last_act()
        except BaseException:  # noqa: BLE001 - it has ended all the same
            print_traceback()
        finally:
            entry.on_end()
