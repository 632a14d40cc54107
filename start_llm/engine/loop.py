"""The scheduler loop of one model: receive, plan a step, execute it, repeat.

Everything here runs on the engine thread, which owns all MLX arrays and calls `step` while there is work.
"""

import time
from contextlib import ExitStack
from functools import partial

from start_llm.core.thread_owners import ENGINE, owned_by
from start_llm.engine.cache_probe import CacheProbe
from start_llm.engine.disk_waits import DiskWaits
from start_llm.engine.engine_task import EngineTask
from start_llm.engine.executor import StepExecutor
from start_llm.engine.generation import Generation
from start_llm.engine.inbox import DiskNews, Inbox, InboxItem, MemoryShare, StopRequest
from start_llm.engine.planner import StepPlanner
from start_llm.engine.resources import EngineResources
from start_llm.engine.schedule import Schedule
from start_llm.engine.step_plan import EndRequest, StepPart
from start_llm.engine.time_share import EngineTime
from start_llm.telemetry.metrics import EngineMetrics

STOPPING = "The server is stopping."
_QUEUE_CHECK_S = 1.0
"""Seconds after which the engine looks whether a request that waits for the disk was cancelled or is late."""
_RETRIES = 2
"""Steps in a row that may fail before every request fails."""
_CACHE_TIDY_S = 0.01
"""Most seconds of a step for trimming the arrays that the prompt cache keeps."""


@owned_by(ENGINE)
class EngineLoop:
    """Receives what other threads put into the inbox, and makes steps: the planner decides, the executor
    does.

    Attributes:
        schedule: the requests that wait.
    """

    def __init__(self, resources: EngineResources, inbox: Inbox, metrics: EngineMetrics) -> None:
        self._resources = resources
        self._inbox = inbox
        self._metrics = metrics
        self._stop: StopRequest | None = None
        self._failed_in_a_row = 0  # steps that failed outside of what a single sequence does
        self._tasks: list[EngineTask] = []  # those that make way for requests
        self._clock = clock = resources.clock
        self._followers = resources.followers
        self.schedule = Schedule(clock)
        self.time = EngineTime(resources, metrics)
        self.executor = StepExecutor(resources, self.schedule, self.time, metrics)
        self._running, self._recovery = self.executor.running, self.executor.recovery
        self._cache, self._failures = resources.cache, self._recovery.failures
        disk_waits = DiskWaits(self._cache.disk, metrics, clock)
        self._planner = StepPlanner(
            resources, self.schedule, self._running, self._failures, self.time, disk_waits
        )
        self._followers.on_news(lambda: inbox.put(DiskNews()))
        self._followers.take_budget(self._cache.budget_bytes, clock())

    @property
    def is_stopping(self) -> bool:
        """True once somebody has asked the loop to stop. Then call `finish`, and `step` no more."""
        return self._stop is not None

    @property
    def rest_s(self) -> float | None:
        """Seconds for which there is nothing to do unless something comes in; None if there is no limit."""
        if self._has_work or not self._inbox.is_empty:
            return 0
        until_disk = self._cache.disk.seconds_until_due()
        if not self.schedule:
            return until_disk
        return _QUEUE_CHECK_S if until_disk is None else min(_QUEUE_CHECK_S, until_disk)

    @property
    def _has_work(self) -> bool:
        return bool(self._planner.startable or self._running.sequences or self._tasks)

    @property
    def yields(self) -> bool:
        """True if there is something to do, and nobody waits for any of it."""
        requests, now = self._generations, self._clock()
        are_known = self._inbox.is_empty and not self.is_stopping
        tasks_yield = all(now < task.yields_until for task in self._tasks)
        return (
            are_known
            and bool(requests or self._tasks)
            and tasks_yield
            and all(map(self.schedule.yields, requests))
        )

    @property
    def _generations(self) -> list[Generation]:
        """All requests, whether they wait or run."""
        return [*self.schedule.generations, *(sequence.generation for sequence in self._running.sequences)]

    def end_turn(self) -> None:
        """Note that another loop computes now: no pause is measured, and what replies hold is sent. Decode
        time that is owed stays owed.
        """
        self.time.end_turn()
        self._running.decoder.end_turn()
        for sequence in self._running.decoder.sequences:
            sequence.generation.send()  # nothing is held while another loop computes

    def finish(self) -> None:
        """Fail every request that is left, and write what is cached to the disk."""
        try:
            self._close_running()
        finally:
            self.fail_the_rest()
        patience_s = self._stop.flush_s if self._stop else 0.0
        self._followers.flush(patience_s)
        with self._failures.on_failure():
            self._cache.disk.flush(patience_s)

    def _close_running(self) -> None:
        """Take what still runs at the end out of the engine. The cache keeps what was computed."""
        for sequence in self._running.sequences:
            if sequence in self._running.sequences:  # unless everything was abandoned since
                self._failures.add([sequence.generation])
                self._execute(EndRequest(sequence.number, is_given_up=True))

    def fail_the_rest(self) -> None:
        """Fail every request that is left. What they computed is lost."""
        self._inbox.close()
        self._receive_all()
        try:
            self._recovery.abandon_everything()
        finally:
            self._failures.tell(STOPPING)
            self._cache.disk.end_reading()

    def step(self) -> None:
        """Run a task, receive what came in, execute what the planner decides, free memory, write to the disk.

        An error in one of these does not keep the others from happening.
        """
        self._metrics.step_began = time.monotonic()
        if not self._has_work:
            self.time.rest()
        self._run_next_task()  # before new ones come in: of those, other models' requests may go first
        self._receive_all()
        self._metrics.waiting = len(self.schedule)
        with self._failures.on_failure(self._recover):
            for part in self._planner.parts():
                self._execute(part)
            self._failed_in_a_row = 0
        self.time.note_step(is_decoding=bool(self._planner.decoding))
        with self._failures.on_failure():
            for part in self._planner.upkeep():
                self._execute(part)
            self._followers.take_trimmed(self._cache.tidy(_CACHE_TIDY_S))
        with self._failures.on_failure():
            self._cache.disk.write_due(is_busy=bool(self._running.sequences))
        self.executor.report()
        self._metrics.step_began = None

    def _recover(self) -> None:
        """Retry what decodes. If step after step fails, something else is at fault: fail every request."""
        self._failed_in_a_row += 1
        if self._failed_in_a_row <= _RETRIES:
            self._recovery.retry_decoding()
        else:
            self._failed_in_a_row = 0
            self._recovery.abandon_everything()

    def _execute(self, part: StepPart) -> None:
        at, failed = self._clock(), self._metrics.failures
        self._followers.take_part(part, at, self.executor.state)
        with ExitStack() as failing:
            failing.callback(self._followers.note_failure)
            self.executor.execute(part, at)
            failing.pop_all()
        if self._metrics.failures > failed:
            self._followers.note_failure()

    def _receive_all(self) -> None:
        for item in self._inbox.take_all():
            self._accept_item(item)

    def _accept_item(self, item: InboxItem) -> None:
        match item:
            case Generation():
                if not item.request.is_idle_work:
                    self._give_up_idle_work()
                with self._failures.on_failure(partial(self._refuse, item)):
                    computing = [prefill.sequence for prefill in self._running.prefills]
                    self.schedule.add(item, self.time.speed, computing)
                    self._followers.take_request(item)
            case CacheProbe():
                with self._failures.on_failure(partial(item.answer, None)):
                    self._answer(item)
            case EngineTask():
                self._accept_task(item)
            case DiskNews():
                self._collect()
            case MemoryShare(usable_bytes, cache_bytes):
                self._resources.admission.usable_bytes = usable_bytes
                with self._failures.on_failure(), self._clock.stopped(at := self._clock()):
                    self._followers.take_budget(cache_bytes, at)
                    self._cache.resize(cache_bytes)
            case StopRequest():
                self._stop = item

    def _refuse(self, generation: Generation) -> None:
        """Fail a request of which the followers know nothing, or that could not be queued."""
        if generation in self.schedule.generations:
            self.schedule.drop(generation.number)
        self._failures.add([generation])

    def _collect(self) -> None:
        """Take what the disk has read."""
        failed = self._metrics.failures
        with self._failures.on_failure(), self._clock.stopped(self._clock()):
            self._cache.disk.collect()
        if self._metrics.failures > failed:
            self._followers.note_failure()

    def _accept_task(self, task: EngineTask) -> None:
        if patience_s := task.patience_s:
            task.yields_until = self._clock() + patience_s
            self._tasks.append(task)
        else:
            self._run(task)

    def _run_next_task(self) -> None:
        """Run a task that makes way for requests, if no prompt is read or its patience is over."""
        if self._tasks and (
            self._clock() >= self._tasks[0].yields_until or not self._planner.is_prompt_awaited
        ):
            self._run(self._tasks.pop(0))

    def _run(self, task: EngineTask) -> None:
        task.run()
        self._running.decoder.end_turn()  # its time is not that of a forward pass

    def _give_up_idle_work(self) -> None:
        """Let what nobody asked for end with its next chunk. The cache keeps what it computed."""
        for generation in self._generations:
            if generation.request.is_idle_work:
                generation.cancel()

    def _answer(self, probe: CacheProbe) -> None:
        request = probe.request
        probe.answer(
            self._cache.opener.peek(
                request.prompt.ids, request.salt, request.boundaries, request.repeated_tokens
            )
        )
