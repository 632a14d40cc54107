"""A rank that decides nothing: it executes the parts of steps that rank 0 sends."""

import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

from start_llm.core.errors import StartLLMError
from start_llm.core.thread_owners import ENGINE, owned_by
from start_llm.engine.executor import StepExecutor
from start_llm.engine.generation import Generation
from start_llm.engine.resources import EngineResources
from start_llm.engine.schedule import Schedule
from start_llm.engine.time_share import EngineTime
from start_llm.ranks.links import Link, LinkClosed
from start_llm.ranks.wire import (
    Message,
    SentBudget,
    SentEnd,
    SentFlush,
    SentPart,
    SentRead,
    SentRequest,
    SentRestore,
    SentRestored,
    SentTrimming,
)
from start_llm.telemetry.metrics import EngineMetrics

_ANY_SPEED = 1.0
"""A follower starts what rank 0 sends, so it does not matter when a request would be due."""

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
            What may be written to the disk at the end has its time besides.
    """

    def __init__(self, link: Link, on_lost: Callable[[], None]) -> None:
        self._link = link
        self._on_lost = on_lost
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        threading.Thread(target=self._receive, name="rank 0", daemon=True).start()

    def next(self, patience_s: float | None = None) -> Message | None:
        """Wait for the next message. Returns None after so many seconds, or when the disk has news."""
        with suppress(queue.Empty):
            return self._messages.get(timeout=patience_s)
        return None

    def note_disk(self) -> None:
        """Note that the disk thread has written or read something."""
        self._messages.put(None)

    def reply(self, message: Message) -> None:
        """Send something to rank 0. That it is gone is noticed where its messages are received."""
        with suppress(LinkClosed):
            self._link.send(message)

    def _receive(self) -> None:
        ends, last_s = False, _LAST_S
        try:
            while True:
                message = self._link.receive()
                ends |= isinstance(message, SentEnd)
                last_s += message.patience_s if isinstance(message, SentFlush) else 0
                self._messages.put(message)
        except LinkClosed:
            time.sleep(last_s if ends else 0)
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
        self._ahead_s = 0.0
        self._schedule = Schedule(resources.clock)
        engine_time = EngineTime(resources, self._metrics)
        self.executor = StepExecutor(resources, self._schedule, engine_time, self._metrics)

    def follow(self, incoming: LeaderMessages) -> None:
        """Do what is sent, until the service ends.

        Raises:
            OutOfStep: this rank cannot do the same as rank 0.
        """
        while not isinstance(message := incoming.next(self._seconds_until_due()), SentEnd):
            if message:
                self.do(message)
            self.keep_on_disk(incoming.reply)

    def _now(self) -> AbstractContextManager[None]:
        """Let it be now on the clock of rank 0, of which this process knows what was sent last."""
        return self._clock.stopped(self._clock.real() + self._ahead_s)

    def _seconds_until_due(self) -> float | None:
        with self._now():
            return self._cache.disk.seconds_until_due()

    def keep_on_disk(self, reply: Callable[[Message], None]) -> None:
        """Read and write files. What is written decides nothing, so each rank chooses it by itself."""
        disk = self._cache.disk
        with self._now():
            if disk.followed:
                for number, files in disk.followed.go_on().items():
                    reply(SentRead(number, files))
            disk.collect()
            disk.write_due(is_busy=bool(self.executor.running.sequences))

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
                with self._at(at):
                    self._cache.resize(nbytes)
            case SentRestore() | SentRestored():
                self._restore(message)
            case SentFlush(patience_s):
                with self._now():
                    self._cache.disk.flush(patience_s)
            case _:
                raise OutOfStep(f"rank 0 sent {type(message).__name__}, which nobody waits for")

    def _at(self, at: float) -> AbstractContextManager[None]:
        """Let it be a time of rank 0, which is the same on all ranks whatever their clocks say."""
        self._ahead_s = at - self._clock.real()
        return self._clock.stopped(at)

    def _restore(self, message: SentRestore | SentRestored) -> None:
        followed = self._cache.disk.followed
        if followed is None:
            raise OutOfStep("rank 0 has a disk tier, and this rank has none")
        with self._at(message.at):
            match message:
                case SentRestore(number, wish):
                    followed.begin(number, wish)
                case SentRestored(number, files):
                    followed.complete(number, files)

    def _take(self, sent: SentRequest) -> None:
        generation = Generation(sent.request)
        self._schedule.add(generation, _ANY_SPEED)
        if generation.number != sent.number:
            raise OutOfStep(f"request {sent.number} is the number {generation.number} here")

    def _execute(self, sent: SentPart) -> None:
        state = self.executor.state()
        if state != sent.state:
            name = type(sent.part).__name__
            raise OutOfStep(f"before {name} it has {state}, and rank 0 has {sent.state}")
        self._ahead_s = sent.at - self._clock.real()
        self.executor.execute(sent.part, sent.at)
        if self._metrics.failures:
            raise OutOfStep(f"{type(sent.part).__name__} failed; the traceback was printed")
