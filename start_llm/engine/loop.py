"""The scheduler loop of one model: receive, preempt, prefill a chunk, decode a step, repeat.

Everything here runs on the engine thread, which owns all MLX arrays and calls `step` while there is work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import mlx.core as mx

from start_llm.cache.pages import SequenceCache
from start_llm.core.events import Failed
from start_llm.core.thread_owners import ENGINE, owned_by
from start_llm.engine.admission import planned_tokens
from start_llm.engine.batch import BatchGroup, Decoder
from start_llm.engine.cache_probe import CacheProbe
from start_llm.engine.disk_waits import DiskWaits
from start_llm.engine.engine_task import EngineTask
from start_llm.engine.generation import Generation
from start_llm.engine.image_reader import ImageReader
from start_llm.engine.inbox import DiskNews, Inbox, InboxItem, MemoryShare, StopRequest
from start_llm.engine.prefill import Prefill
from start_llm.engine.reply_writer import ReplyWriter
from start_llm.engine.resources import EngineResources
from start_llm.engine.schedule import QueuedRequest, Schedule, deadline_after_restore, should_preempt
from start_llm.engine.sequence import EngineSequence, Sampled
from start_llm.engine.time_share import EngineTime
from start_llm.telemetry.metrics import EngineMetrics

STOPPING = "The server is stopping."
_STEPS_BETWEEN_MEMORY_CHECKS = 64
_QUEUE_CHECK_S = 1.0
"""Seconds after which the engine looks whether a request that waits for the disk was cancelled."""
_CACHE_TIDY_S = 0.01
"""Most seconds of a step for trimming the arrays that the prompt cache keeps."""


@owned_by(ENGINE)
class EngineLoop:
    """Schedules requests, prefills prompts and decodes replies.

    One prompt is prefilled at a time. While replies are running, prefill chunks and decode steps alternate,
    each within its share of the time. A sequence can be preempted between any two steps. The cache then
    keeps what it computed, and the sequence resumes when the schedule picks it again.

    If a step raises, the caches of its sequences are discarded and all other sequences continue. A lone
    sequence fails; the sequences of a batch are retried one by one, so that only the faulty one fails.

    Args:
        clock: Returns seconds.
    """

    def __init__(
        self,
        resources: EngineResources,
        inbox: Inbox,
        metrics: EngineMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resources = resources
        self._inbox = inbox
        self._metrics = metrics
        self._clock = clock
        self._schedule = Schedule(clock)
        self._time = EngineTime(resources, metrics, clock)
        self._cache = resources.cache
        self._disk_waits = DiskWaits(self._cache.disk, metrics, clock)
        self._reader = (
            ImageReader(resources.vision, metrics, resources.image_bytes) if resources.vision else None
        )
        self._steps = 0
        self._starting: QueuedRequest | None = None  # taken from the schedule, not being prefilled yet
        self._starting_cache: SequenceCache | None = None  # what was restored for it
        self._prefill: Prefill | None = None
        self._decoder = Decoder(
            resources.network, resources.batches, resources.admission.fits, mount=resources.mount
        )
        self._failed: list[Generation] = []  # requests whose clients are not told yet
        self._stop: StopRequest | None = None

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
        return min(_QUEUE_CHECK_S, until_disk or _QUEUE_CHECK_S) if self._schedule else until_disk

    @property
    def _has_work(self) -> bool:
        return bool(self._startable or self._prefill or self._decoder.sequences)

    def rest(self) -> None:
        """Note that the loop does not go on at once: no pause is measured, and no decode time is owed."""
        self._time.rest()

    def finish(self) -> None:
        """Fail every request that is left, and write what is cached to the disk."""
        try:
            self._keep_running()
        finally:
            self.fail_the_rest()
        with self._on_failure(_abandon_nothing):
            self._cache.disk.flush(self._stop.flush_s if self._stop else 0.0)

    def _keep_running(self) -> None:
        """Take what still runs at the end out of the engine. The cache keeps what was computed."""
        for sequence in self._running:
            with self._blaming(sequence):
                if self._decoder.contains(sequence):
                    self._retire(sequence, is_given_up=True)
                else:
                    self._stop_prefill(is_given_up=True)
                self._failed.append(sequence.generation)

    def fail_the_rest(self) -> None:
        """Fail every request that is left. What they computed is lost."""
        self._inbox.close()
        self._receive_all()
        try:
            self._abandon_everything()
        finally:
            self._tell_failed(STOPPING)

    def step(self) -> None:
        self._metrics.step_began = time.monotonic()
        if not self._has_work:
            self.rest()
        self._receive_all()
        self._metrics.waiting = len(self._schedule)
        with self._on_failure(self._abandon_decoding):
            self._drop_cancelled()
        self._disk_waits.end_late(self._schedule.restoring)
        with self._on_failure(self._abandon_decoding):
            self._end_overdue()
        with self._on_failure(self._abandon_decoding):
            self._preempt()
        if (self._prefill or self._startable) and self._time.may_prefill(
            is_decoding=bool(self._decoder.sequences)
        ):
            self._prefill_some()
        self._decode()
        with self._on_failure(_abandon_nothing):
            self._balance_memory()
        with self._on_failure(_abandon_nothing):
            self._cache.disk.write_due(is_busy=bool(self._running))
        self._report()
        self._metrics.step_began = None

    # ------------------------------------------------------------------------------------- receive and cancel

    def _receive_all(self) -> None:
        for item in self._inbox.take_all():
            self._accept_item(item)

    def _accept_item(self, item: InboxItem) -> None:
        match item:
            case Generation():
                self._schedule.add(item, self._time.speed, self._prefill.sequence if self._prefill else None)
            case CacheProbe():
                with self._on_failure(partial(item.answer, None)):
                    self._answer(item)
            case EngineTask():
                item.run()
            case DiskNews():
                with self._on_failure(_abandon_nothing):
                    self._cache.disk.collect()
            case MemoryShare(usable_bytes, cache_bytes):
                self._resources.admission.usable_bytes = usable_bytes
                with self._on_failure(_abandon_nothing):
                    self._cache.resize(cache_bytes)
            case StopRequest():
                self._stop = item

    def _answer(self, probe: CacheProbe) -> None:
        request = probe.request
        probe.answer(
            self._cache.peek(request.prompt.ids, request.salt, request.boundaries, request.repeated_tokens)
        )

    def _drop_cancelled(self) -> None:
        self._schedule.drop_cancelled()
        if self._prefill and self._prefill.sequence.cancelled:
            with self._blaming(self._prefill.sequence):
                self._stop_prefill(is_given_up=self._prefill.sequence.generation.is_given_up)
        for sequence in self._decoder.sequences:
            if sequence.cancelled:
                with self._blaming(sequence):
                    self._retire(sequence, is_given_up=sequence.generation.is_given_up)

    def _end_overdue(self) -> None:
        """End replies that exceeded their deadline. The cache keeps what they computed."""
        running, now = self._running, self._clock()
        for sequence in [*self._schedule.preempted, *running]:
            run_time_s = sequence.run_time_s(now if sequence in running else sequence.running_since)
            if 0 < self._resources.time_limits.deadline_s < run_time_s:
                sequence.cut()
                sequence.generation.cancel(is_over=True)
        self._drop_cancelled()

    @property
    def _running(self) -> list[EngineSequence]:
        return [*([self._prefill.sequence] if self._prefill else []), *self._decoder.sequences]

    # --------------------------------------------------------------------------------------------- preemption

    def _preempt(self) -> None:
        """Preempt sequences when a short prompt, a queued request or memory pressure requires it."""
        first, prefill = self._schedule.first, self._prefill
        if first and prefill and self._cache.supports_reuse:
            if should_preempt(first, prefill.sequence, prefill.done) and self._has_room(
                first, self._decoder.sequences
            ):
                with self._blaming(prefill.sequence):
                    self._preempt_prefill(prefill.sequence)
        elif first and not prefill and not self._has_room(first, self._running):
            self._preempt_longest_for(first)
        self._preempt_beyond_memory()

    def _preempt_prefill(self, sequence: EngineSequence) -> None:
        """Stop prefilling this sequence in mid-prompt and put it back into the schedule."""
        self._stop_prefill()
        sequence.pause(self._clock())
        self._schedule.requeue(sequence, sequence.due)  # it keeps its place

    def _stop_prefill(self, *, is_given_up: bool = False) -> None:
        """Stop prefilling in mid-prompt. The cache keeps what was computed."""
        if self._prefill:
            sequence, self._prefill = self._prefill.sequence, None
            caches, tokens = sequence.layer_caches, sequence.seq_cache.tokens
            self._cache.close(sequence.seq_cache, caches, tokens, is_given_up=is_given_up)
            mx.clear_cache()

    def _has_room(self, waiting: QueuedRequest, beside: list[EngineSequence]) -> bool:
        """True if a queued request can run beside these sequences, which stay in the engine."""
        restoring = self._schedule.restoring
        has_slot = len(beside) + len(restoring) < self._resources.max_sequences
        reserved = [planned_tokens(one.generation.request, one.tokens) for one in restoring]
        request = waiting.generation.request
        return has_slot and self._resources.admission.has_room(beside, request, waiting.tokens, reserved)

    def _preempt_longest_for(self, first: QueuedRequest) -> None:
        """Preempt the sequence that has run longest without a pause, once it has run for
        `preempt_after_s`.
        """
        sequences, now = self._decoder.sequences, self._clock()
        if not sequences or now < first.due or not self._can_keep_all(first):
            return
        sequence = min(sequences, key=lambda one: one.running_since)
        if now - sequence.running_since >= self._resources.time_limits.preempt_after_s:
            with self._blaming(sequence):
                self._preempt_decoding(sequence)

    def _can_keep_all(self, first: QueuedRequest) -> bool:
        """True if the caches of all sequences fit into memory together, so that nothing is computed twice."""
        lengths = [len(sequence.tokens) for sequence in (*self._schedule.preempted, *self._running)]
        newcomer = [] if first.sequence else [first.tokens]
        held = self._resources.admission.bytes_for([*lengths, *newcomer])
        return self._cache.supports_reuse and held <= self._cache.budget_bytes

    def _preempt_beyond_memory(self) -> None:
        """Preempt the sequence that started or resumed last if all together have outgrown the memory
        budget.
        """
        sequences = self._decoder.sequences
        lengths = [len(sequence.tokens) for sequence in self._running]
        if len(sequences) > 1 and not self._resources.admission.fits(lengths):
            newest = max(sequences, key=lambda one: one.running_since)
            with self._blaming(newest):
                self._preempt_decoding(newest)

    def _preempt_decoding(self, sequence: EngineSequence) -> None:
        """Take a sequence out of its batch in mid-reply and put it back into the schedule."""
        held, sampled = self._decoder.release(sequence)
        self._cache.batched_bytes = self._decoder.batched_bytes
        self._cache.close(sequence.seq_cache, held.caches, sequence.tokens[: held.tokens])
        if sampled is None or not self._append_token(sampled):
            sequence.pause(self._clock())
            self._schedule.requeue(sequence)
            self._metrics.preemptions += 1

    # ------------------------------------------------------------------------------------------------ prefill

    @property
    def _startable(self) -> QueuedRequest | None:
        first = self._schedule.first
        return first if first and self._has_room(first, self._running) else None

    def _start_next(self) -> None:
        """Restore the next queued sequence from the cache, unless one is being prefilled or it has no
        room.
        """
        with self._on_failure(self._abandon_starting):
            while not self._prefill and (first := self._startable):
                self._start(first)

    def _start(self, first: QueuedRequest) -> None:
        """Start or resume a request, unless it has to wait for the disk first."""
        self._starting = first
        self._schedule.take(first)
        if self._disk_waits.has_to_wait(first, self._time.speed):
            self._schedule.put_back(first)
            self._starting = None
            return
        sequence, checkpoint_positions = (
            self._reopen(first.sequence) if first.sequence else self._open_new(first)
        )
        self._prefill = Prefill(
            self._resources.network,
            sequence,
            checkpoint_positions,
            self._reader,
            mount=self._resources.mount,
        )
        self._starting = self._starting_cache = None
        self._report()

    def _open_new(self, waiting: QueuedRequest) -> tuple[EngineSequence, tuple[int, ...]]:
        request = waiting.generation.request
        ids, room = request.prompt.ids, planned_tokens(request, waiting.tokens)
        opened = self._cache.open(ids, request.salt, request.boundaries, request.repeated_tokens, room)
        self._starting_cache = opened.seq_cache
        cached = len(opened.seq_cache.tokens)
        reply = ReplyWriter(
            request, self._resources.token_bytes, self._resources.eos_token_ids, cached=cached
        )
        due = deadline_after_restore(waiting, cached, self._time.speed)
        sequence = EngineSequence(waiting.generation, reply, opened.seq_cache, due=due, now=self._clock())
        tokens, seconds = waiting.from_disk
        sequence.generation.emit(replace(opened.restored, disk_tokens=min(tokens, cached), disk_s=seconds))
        return sequence, opened.checkpoint_positions

    def _reopen(self, sequence: EngineSequence) -> tuple[EngineSequence, tuple[int, ...]]:
        request = sequence.generation.request
        repeated_tokens = len(sequence.tokens) if sequence.has_begun else sequence.seq_cache.repeated_tokens
        ids, room = tuple(sequence.tokens), planned_tokens(request, len(sequence.tokens))
        opened = self._cache.reopen(
            ids, request.salt, request.boundaries, repeated_tokens, len(request.prompt), room
        )
        self._starting_cache = opened.seq_cache
        sequence.resume(opened.seq_cache, self._clock())
        return sequence, opened.checkpoint_positions

    def _prefill_some(self) -> None:
        """Prefill one chunk of a long prompt, or as many short prompts as take no longer than that."""
        with self._time.decoding():
            self._wait_for_steps()  # their time does not count as the chunk's
        with self._time.prefilling(is_decoding=bool(self._decoder.sequences)) as fits:
            self._start_next()
            while prefill := self._prefill:
                with self._on_failure(self._abandon_prefill):
                    self._prefill_chunk(prefill)
                if not prefill.is_complete:
                    return
                self._start_next()
                if not fits(self._prefill):
                    return

    def _wait_for_steps(self) -> None:
        for group in self._decoder.groups:
            with self._on_failure(partial(self._abandon_group, group)):
                group.wait()

    def _prefill_chunk(self, prefill: Prefill) -> None:
        if prefill.look():
            return  # that was enough for one step
        computed = self._time.compute_chunk(prefill, is_decoding=bool(self._decoder.sequences))
        sequence, done = prefill.sequence, prefill.done
        self._cache.record_chunk(
            sequence.seq_cache, sequence.tokens[done - computed : done], keep_state=prefill.is_at_checkpoint
        )
        if prefill.is_complete:
            self._decoder.add(sequence)
            self._prefill = None

    # ----------------------------------------------------------------------------------------------- decoding

    def _decode(self) -> None:
        """Decode one token for each sequence. Those that join a batch now only have their first step
        launched.
        """
        with self._time.decoding():
            while self._decoder.next_to_join:
                with self._on_failure(self._abandon_joining):
                    self._decoder.join_next()
            for group in self._decoder.groups:
                with self._on_failure(partial(self._abandon_group, group)):
                    self._step(group)
        self._time.note_step(is_decoding=bool(self._decoder.groups))

    def _step(self, group: BatchGroup) -> None:
        if group not in self._decoder.groups:
            return  # `_abandon_everything` has run since
        for sampled in group.step():
            with self._blaming(sampled.sequence):
                self._accept(sampled)

    def _accept(self, sampled: Sampled) -> None:
        if self._decoder.contains(sampled.sequence) and self._append_token(sampled):
            self._retire(sampled.sequence)

    def _append_token(self, sampled: Sampled) -> bool:
        self._metrics.generated_tokens += 1
        return sampled.sequence.accept(sampled.token, sampled.scored, sampled.surprisal)

    def _retire(self, sequence: EngineSequence, *, is_given_up: bool = False) -> None:
        """Take a sequence out of its batch and return its caches to the prompt cache."""
        if self._decoder.contains(sequence):
            caches, count = self._decoder.remove(sequence)
            self._cache.batched_bytes = self._decoder.batched_bytes
            tokens = sequence.tokens[:count]
            self._cache.close(sequence.seq_cache, caches, tokens, is_given_up=is_given_up)

    def _balance_memory(self) -> None:
        """Shrink the prompt cache when batches hold more, and at intervals when memory is short."""
        self._steps += 1
        batched, is_time = self._decoder.batched_bytes, self._steps % _STEPS_BETWEEN_MEMORY_CHECKS == 0
        if batched != self._cache.batched_bytes or is_time:
            self._cache.batched_bytes = batched
            self._cache.shrink(self._resources.shortage() if is_time else 0)
        self._cache.tidy(_CACHE_TIDY_S)

    # ----------------------------------------------------------------------------------------------- failures

    @contextmanager
    def _on_failure(self, abandon: Callable[[], None]) -> Generator[None]:
        """If the block raises, run `abandon` and tell the requests in `_failed` that they failed.

        The loop goes on.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever a network raises, other requests must survive
            self._metrics.failures += 1
            try:
                abandon()
            except Exception:  # noqa: BLE001 - nothing that is here can be trusted; later requests must survive
                self._abandon_everything()
            self._tell_failed(f"The engine failed: {type(error).__name__}: {error}")
            mx.clear_cache()

    def _blaming(self, sequence: EngineSequence) -> AbstractContextManager[None]:
        """If the block raises, this sequence alone fails."""
        return self._on_failure(partial(self._abandon_sequence, sequence))

    def _tell_failed(self, message: str) -> None:
        for generation in dict.fromkeys(self._failed):
            generation.emit(Failed(message))
        self._failed.clear()

    def _fail(self, sequences: Sequence[EngineSequence]) -> None:
        """Fail these sequences and discard their caches, each of them even if another one raises."""
        self._failed += [sequence.generation for sequence in sequences]
        with ExitStack() as discards:
            for sequence in sequences:
                discards.callback(self._cache.discard, sequence.seq_cache)

    def _abandon_everything(self) -> None:
        self._failed += self._schedule.take_all()
        sequences = [*self._decoder.abandon(), *self._take_prefill()]
        try:
            self._fail(sequences)
        finally:
            self._abandon_starting()

    def _abandon_sequence(self, sequence: EngineSequence) -> None:
        """Fail a sequence. If it cannot be taken out of its batch, everything fails with it."""
        self._fail([sequence])
        self._decoder.remove(sequence)

    def _abandon_joining(self) -> None:
        self._retry_alone(self._decoder.drop_joining())

    def _abandon_group(self, group: BatchGroup) -> None:
        self._retry_alone(self._decoder.drop(group))

    def _abandon_decoding(self) -> None:
        """Which sequence is at fault is not known here, so each that is being decoded is retried alone."""
        self._retry_alone(self._decoder.abandon())

    def _retry_alone(self, sequences: list[EngineSequence]) -> None:
        """Retry each sequence of a failed batch outside batches, so that only the faulty one fails again."""
        self._fail(sequences)
        for sequence in sequences:
            if len(sequences) > 1 and sequence.can_resume:
                sequence.excluded_from_batches = True
                sequence.pause(self._clock())
                self._schedule.requeue(sequence)
                self._failed.remove(sequence.generation)

    def _abandon_starting(self) -> None:
        if self._starting is not None:
            self._failed.append(self._starting.generation)
            self._starting = None
        if self._starting_cache is not None:
            self._cache.discard(self._starting_cache)
            self._starting_cache = None

    def _abandon_prefill(self) -> None:
        self._fail(self._take_prefill())

    def _take_prefill(self) -> list[EngineSequence]:
        prefill, self._prefill = self._prefill, None
        return [prefill.sequence] if prefill else []

    def _report(self) -> None:
        self._metrics.waiting = len(self._schedule)
        self._metrics.active_sequences = len(self._decoder.sequences)
        self._metrics.prefill = (self._prefill.done, self._prefill.total) if self._prefill else None


def _abandon_nothing() -> None:
    pass
