"""A rank that decides nothing: it executes the parts of steps that rank 0 sends."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from start_llm.core.errors import StartLLMError
from start_llm.core.thread_owners import ENGINE, owned_by
from start_llm.engine.executor import StepExecutor
from start_llm.engine.executor_state import state_of
from start_llm.engine.generation import Generation
from start_llm.engine.resources import EngineResources
from start_llm.engine.schedule import Schedule
from start_llm.engine.time_share import EngineTime
from start_llm.ranks.links import Link, LinkClosed
from start_llm.ranks.wire import (
    Message,
    SentBudget,
    SentEnd,
    SentPart,
    SentRequest,
    SentTrimming,
)
from start_llm.telemetry.metrics import EngineMetrics

_ANY_SPEED = 1.0
"""A follower starts what it is told to, so it does not matter when a request would be due."""

_LAST_S = 5.0
"""Seconds that a follower has to end."""


class OutOfStep(StartLLMError):
    """This rank does not have what rank 0 has, so it must not compute any further."""


class LeaderMessages:
    """The messages of rank 0, in their order, which a thread of its own receives.

    So a rank that waits for another one in the middle of a forward pass still notices that rank 0 is gone.

    Args:
        on_lost: called on that thread when rank 0 is gone: at once, or some seconds after it has said that
            the service ends, if this process still runs then. It may wait for rank 0 in the middle of a pass.
    """

    def __init__(self, link: Link, on_lost: Callable[[], None]) -> None:
        self._link = link
        self._on_lost = on_lost
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        threading.Thread(target=self._receive, name="rank 0", daemon=True).start()

    def next(self) -> Message:
        """Wait for the next message."""
        return self._messages.get()

    def _receive(self) -> None:
        ends = False
        try:
            while True:
                message = self._link.receive()
                ends |= isinstance(message, SentEnd)
                self._messages.put(message)
        except LinkClosed:
            time.sleep(_LAST_S if ends else 0)
            self._on_lost()


@owned_by(ENGINE)
class Follower:
    """Has an executor, and the requests that rank 0 has.

    Args:
        resources: built with the settings of rank 0. Its engine measures and decides nothing.
    """

    def __init__(self, resources: EngineResources) -> None:
        self._metrics = EngineMetrics()
        self._cache = resources.cache
        self._clock = resources.clock
        self._schedule = Schedule(resources.clock)
        engine_time = EngineTime(resources, self._metrics)
        self.executor = StepExecutor(resources, self._schedule, engine_time, self._metrics)

    def follow(self, incoming: LeaderMessages) -> None:
        """Do what is sent, until the service ends.

        Raises:
            OutOfStep: this rank cannot do the same as rank 0.
        """
        while not isinstance(message := incoming.next(), SentEnd):
            self.do(message)

    def do(self, message: Message) -> None:
        """Do one thing.

        Raises:
            OutOfStep: this rank cannot do the same as rank 0.
        """
        match message:
            case SentRequest():
                self._take(message)
            case SentPart():
                self._execute(message)
            case SentTrimming(arrays):
                self._cache.trim(arrays)
            case SentBudget(nbytes, at):
                with self._clock.stopped(at):
                    self._cache.resize(nbytes)
            case _:
                raise OutOfStep(f"rank 0 sent {type(message).__name__}, which nobody waits for")

    def _take(self, sent: SentRequest) -> None:
        generation = Generation(sent.request)
        self._schedule.add(generation, _ANY_SPEED)
        if generation.number != sent.number:
            raise OutOfStep(f"request {sent.number} is the number {generation.number} here")

    def _execute(self, sent: SentPart) -> None:
        state = state_of(self.executor)
        if state != sent.state:
            name = type(sent.part).__name__
            raise OutOfStep(f"before {name} it has {state}, and rank 0 has {sent.state}")
        self.executor.execute(sent.part, sent.at)
        if self._metrics.failures:
            raise OutOfStep(f"{type(sent.part).__name__} failed; the traceback was printed")
