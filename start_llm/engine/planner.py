"""Decide what a step does. No network runs here, and no reply changes.

Besides deciding, it asks the disk for what the next prompt lacks, fails requests whose start cannot be
planned, and counts the steps between two measurements of memory, of decode time and of what drafts gain.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from start_llm.core.thread_owners import ENGINE, owned_by
from start_llm.engine.admission import planned_tokens
from start_llm.engine.batch import BatchGroup
from start_llm.engine.disk_waits import DiskWaits
from start_llm.engine.failures import Failures
from start_llm.engine.generation import Generation
from start_llm.engine.prefill import Prefill
from start_llm.engine.resources import EngineResources
from start_llm.engine.running import RunningSequences
from start_llm.engine.schedule import QueuedRequest, Schedule, deadline_after_restore
from start_llm.engine.sequence import EngineSequence
from start_llm.engine.shared_passes import may_share_passes, repeats_others
from start_llm.engine.step_plan import (
    ComputeChunk,
    ComputeChunks,
    DecodeToken,
    EndRequest,
    FreeMemory,
    JoinBatch,
    LookAtImage,
    PreemptRequest,
    StartRequest,
    StepPart,
)
from start_llm.engine.time_share import EngineTime

_STEPS_BETWEEN_MEMORY_CHECKS = 64


@owned_by(ENGINE)
class StepPlanner:
    """Decides by deadlines, times, memory and clients that went away.

    One prompt is prefilled at a time, or several short ones together. While replies are running, prefill
    chunks and decode steps alternate, each within its share of the time. A sequence can be preempted between
    any two steps. The cache then keeps what it computed, and the sequence resumes when the schedule picks it
    again.

    Args:
        running: the sequences that run. They change with each part, before the next is decided.
    """

    def __init__(
        self,
        resources: EngineResources,
        schedule: Schedule,
        running: RunningSequences,
        failures: Failures,
        time: EngineTime,
        disk_waits: DiskWaits,
    ) -> None:
        self._resources = resources
        self._schedule = schedule
        self._running = running
        self._failures = failures
        self._cache = resources.cache
        self._time = time
        self._disk_waits = disk_waits
        self._clock = resources.clock
        self._steps = 0

    def parts(self) -> Iterator[StepPart]:
        """Yield the parts of a step. The caller executes each before it asks for the next."""
        for part in self._ends():
            if self._is_there(part.number):  # unless it is gone and late, or has failed with another one
                yield part
        self._disk_waits.end_late(self._schedule.restoring)
        yield from self._preemptions()
        yield from self._prefill_parts()
        yield from self._decode_parts()

    def upkeep(self) -> Iterator[FreeMemory]:
        """Shrink the prompt cache when batches hold more or less, and every 64 steps, by what memory is
        short.
        """
        self._steps += 1
        batched, is_time = (
            self._running.decoder.batched_bytes,
            self._steps % _STEPS_BETWEEN_MEMORY_CHECKS == 0,
        )
        if batched != self._cache.batched_bytes or is_time:
            yield FreeMemory(self._resources.shortage() if is_time else 0)

    # ---------------------------------------------------------------------------------------- end and preempt

    def _ends(self) -> list[EndRequest]:
        """End requests whose clients went away, and replies that exceeded their deadline."""
        now, running, waiting = self._clock(), self._running.sequences, self._schedule.generations
        requests = [*waiting, *(sequence.generation for sequence in running)]
        gone = [generation for generation in requests if generation.cancelled]
        has_place = {queued.generation.number for queued in self._schedule.restoring}
        has_place |= {sequence.number for sequence in self._schedule.preempted}
        gone += [
            generation
            for generation in waiting
            if generation.number not in has_place and self._has_no_place(generation)
        ]
        late = [
            sequence
            for sequence in (*self._schedule.preempted, *running)
            if self._is_late(sequence, now if sequence in running else sequence.running_since)
        ]
        return [
            *(EndRequest(generation.number, is_given_up=generation.is_given_up) for generation in gone),
            *(EndRequest(sequence.number, is_cut=True) for sequence in late),
        ]

    def _is_there(self, number: int) -> bool:
        waits = any(generation.number == number for generation in self._schedule.generations)
        return waits or self._running.numbered(number) is not None

    def _has_no_place(self, generation: Generation) -> bool:
        """Return whether it is idle work that would displace what requests have left in the cache."""
        request, cache = generation.request, self._cache
        if not request.is_idle_work or generation.cancelled:
            return False
        return self._resources.admission.bytes_for([len(request.prompt)]) > cache.free_bytes

    def _is_late(self, sequence: EngineSequence, now: float) -> bool:
        return 0 < self._resources.time_limits.deadline_s < sequence.run_time_s(now)

    def _preemptions(self) -> Iterator[PreemptRequest]:
        """Preempt sequences when a short prompt, a queued request or memory pressure requires it."""
        first, prefills = self._next, self._running.prefills
        if first and prefills:
            yield from self._overtaken(first, prefills)
        elif first and not self._has_room(first, self._running.sequences):
            yield from self._preempt_longest_for(first)
        yield from self._preempt_beyond_memory()

    def _overtaken(self, first: QueuedRequest, prefills: Sequence[Prefill]) -> Iterator[PreemptRequest]:
        """Preempt a prompt that is prefilled alone. Of those that share passes, only the ones that nobody
        waits for make way.
        """
        for prefill in prefills:
            sequence = prefill.sequence
            makes_way = self._schedule.yields(sequence.generation, first.generation)
            if (len(prefills) == 1 or makes_way) and self._should_overtake(first, prefill):
                yield PreemptRequest(sequence.number, sequence.due)  # it keeps its place

    def _should_overtake(self, first: QueuedRequest, prefill: Prefill) -> bool:
        decoding = self._running.decoder.sequences
        stay = [
            sequence
            for sequence in decoding
            if not self._schedule.yields(sequence.generation, first.generation)
        ]
        return (
            self._cache.supports_reuse
            and self._schedule.should_preempt(first, prefill.sequence, prefill.done)
            and self._has_room(first, stay)
        )

    def _preempt_longest_for(self, first: QueuedRequest) -> Iterator[PreemptRequest]:
        """Preempt the sequence that has run longest without a pause, once it has run for
        `preempt_after_s`. One that makes way for the queued request is preempted at once. None is, unless
        memory keeps what all have computed.
        """
        sequence, now = self._longest_for(first), self._clock()
        if sequence is None or not self._can_keep_all(first):
            return
        has_run_s, limit_s = now - sequence.running_since, self._resources.time_limits.preempt_after_s
        makes_way = self._schedule.yields(sequence.generation, first.generation)
        if makes_way or (now >= first.due and has_run_s >= limit_s):
            yield PreemptRequest(sequence.number, now)

    def _longest_for(self, first: QueuedRequest) -> EngineSequence | None:
        """Return the sequence that has run longest of those that make way for the queued request. If there
        are none: of those for which it does not make way itself.
        """
        sequences, asked = self._running.decoder.sequences, first.generation
        yielding = [sequence for sequence in sequences if self._schedule.yields(sequence.generation, asked)]
        equals = [sequence for sequence in sequences if not self._schedule.yields(asked, sequence.generation)]
        return min(yielding or equals, key=lambda sequence: sequence.running_since, default=None)

    def _preempt_beyond_memory(self) -> Iterator[PreemptRequest]:
        """Preempt the sequence that started or resumed last if all together have outgrown the memory
        budget.
        """
        sequences = self._running.decoder.sequences
        lengths = [len(sequence.tokens) for sequence in self._running.sequences]
        if len(sequences) > 1 and not self._resources.admission.fits(lengths):
            newest = max(sequences, key=lambda running: running.running_since)
            yield PreemptRequest(newest.number, self._clock())

    def _has_room(self, waiting: QueuedRequest, beside: list[EngineSequence]) -> bool:
        """True if a queued request can run beside these sequences, which stay in the engine.

        What the disk is read for has its memory, but no place if it makes way for the request.
        """
        request, restoring = waiting.generation.request, self._schedule.restoring
        stay = [
            queued for queued in restoring if not self._schedule.yields(queued.generation, waiting.generation)
        ]
        has_slot = len(beside) + len(stay) < self._resources.max_sequences
        reserved = [planned_tokens(queued.generation.request, queued.tokens) for queued in restoring]
        return has_slot and self._resources.admission.has_room(beside, request, waiting.tokens, reserved)

    def _can_keep_all(self, first: QueuedRequest) -> bool:
        """True if the caches of all sequences fit into memory together, so that nothing is computed twice."""
        lengths = [len(sequence.tokens) for sequence in (*self._schedule.preempted, *self._running.sequences)]
        newcomer = [] if first.sequence else [first.tokens]
        held = self._resources.admission.bytes_for([*lengths, *newcomer])
        cache = self._cache
        return cache.supports_reuse and held <= cache.budget_bytes

    # ------------------------------------------------------------------------------------------------ prefill

    @property
    def startable(self) -> QueuedRequest | None:
        """The next request, if it has room."""
        first = self._next
        return first if first and self._has_room(first, self._running.sequences) else None

    @property
    def _next(self) -> QueuedRequest | None:
        """The next request, unless it makes way for one that runs."""
        first = self._schedule.first
        return None if first and self._has_to_wait(first.generation) else first

    def _has_to_wait(self, first: Generation) -> bool:
        """Return whether a request makes way: for prompts, and if nothing is generated for replies too."""
        others = self._prompts
        if first.request.is_prewarm:
            others += [sequence.generation for sequence in self._running.decoder.sequences]
        return any(self._schedule.yields(first, generation) for generation in others)

    @property
    def _prompts(self) -> list[Generation]:
        """The requests whose prompts are read, from the disk or by the network, up to their first token."""
        return [*(queued.generation for queued in self._schedule.restoring), *self._computing]

    @property
    def _computing(self) -> list[Generation]:
        """The requests whose prompts are read by the network."""
        return [sequence.generation for sequence in self._running.sequences if not sequence.has_begun]

    @property
    def is_prompt_awaited(self) -> bool:
        """True if somebody waits for a prompt that the network reads, or can read now."""
        startable = self.startable
        prompts = [*self._computing, *([startable.generation] if startable else [])]
        return not all(map(self._schedule.yields, prompts))

    def _pauses(self, sequence: EngineSequence) -> bool:
        return self._schedule.yields(sequence.generation) and self.is_prompt_awaited

    @property
    def _is_decoding(self) -> bool:
        return any(not self._pauses(sequence) for sequence in self._running.decoder.sequences)

    def _prefill_parts(self) -> Iterator[StepPart]:
        """Prefill one chunk of a long prompt, or as many short prompts as take no longer than that."""
        is_decoding = self._is_decoding
        has_prompt = bool(self._running.prefills or self.startable)
        if not has_prompt or not self._time.may_prefill(is_decoding=is_decoding):
            return
        self._time.begin_prefill(is_decoding=is_decoding)
        yield from self._starts()
        while self._running.prefills:
            part = self._next_chunk()
            yield part
            if self._has_used_its_time(part):
                return
            yield from self._starts()
            if not self._has_time_for([prefill.remaining for prefill in self._running.prefills]):
                return

    def _has_used_its_time(self, part: LookAtImage | ComputeChunk | ComputeChunks) -> bool:
        """Return whether a prompt is still computed whose chunk was as long as it might be, or part of an
        image, whose time is not known.
        """
        numbers = part.numbers if isinstance(part, ComputeChunks) else (part.number,)
        return any(
            prefill.sequence.number in numbers and (prefill.image or not prefill.is_at_checkpoint)
            for prefill in self._running.prefills
        )

    def _next_chunk(self) -> LookAtImage | ComputeChunk | ComputeChunks:
        prefills = self._running.prefills
        complete = next((prefill for prefill in prefills if prefill.is_complete), None)
        if complete or len(prefills) == 1:
            return self._next_of(complete or prefills[0])
        return ComputeChunks(tuple(prefill.sequence.number for prefill in prefills))

    def _has_time_for(self, left: Sequence[int]) -> bool:
        """Return whether prompts that have so many tokens left still fit into a chunk's time in this step."""
        before = max((prefill.done for prefill in self._running.prefills), default=0)
        return not left or self._time.fits(len(left) * max(left), before)

    def _next_of(self, prefill: Prefill) -> LookAtImage | ComputeChunk:
        number = prefill.sequence.number
        if prefill.must_look:
            return LookAtImage(number)
        return ComputeChunk(number, self._time.chunk_length(prefill, is_decoding=self._is_decoding))

    def _starts(self) -> Iterator[StartRequest | EndRequest]:
        """Start the next request that need not wait for the disk, unless a prompt is being prefilled, and
        those that share its passes. End those whose start cannot be planned.
        """
        while (first := self.startable) and self._may_start(first):
            part = self._start_unless_waiting(first)
            if isinstance(part, StartRequest) and not self._shares_passes(first, part.restored):
                return
            if part:
                yield part

    def _may_start(self, first: QueuedRequest) -> bool:
        prefills = self._running.prefills
        return not prefills or (self._resources.batches_prefill and may_share_passes(first, prefills))

    def _shares_passes(self, first: QueuedRequest, restored: int) -> bool:
        """Return whether a request that may share the passes of others, if there are any, should."""
        prefills = self._running.prefills
        left = [*(prefill.remaining for prefill in prefills), first.tokens - 1 - restored]
        return not prefills or (
            self._has_time_for(left)
            and self._time.saves_time(left, max(prefill.done for prefill in prefills))
            and not repeats_others(first, restored, prefills, self._cache)
        )

    def _start_unless_waiting(self, first: QueuedRequest) -> StartRequest | EndRequest | None:
        """Return the start of a request, or its end if it failed; None if it has to wait for the disk."""
        with self._failures.on_failure(partial(self._failures.add, [first.generation])):
            speed = self._time.speed
            with self._clock.stopped(self._clock()):  # other ranks make room for a restore at this time too
                has_to_wait = self._disk_waits.has_to_wait(first, speed)
            return None if has_to_wait else self._start_of(first)
        return EndRequest(first.generation.number)

    def _start_of(self, first: QueuedRequest) -> StartRequest:
        restored = self._cache.opener.restorable(first.ids, first.generation.request.salt)
        speed = self._time.speed
        due = first.sequence.due if first.sequence else deadline_after_restore(first, restored, speed)
        tokens, seconds = first.from_disk
        gain = self._resources.gain
        is_idle_work = first.generation.request.is_idle_work  # which reads again what was added already
        uses_earlier = gain is not None and gain.can_pay() and not is_idle_work
        return StartRequest(
            first.generation.number, restored, due, min(tokens, restored), seconds, uses_earlier
        )

    # ----------------------------------------------------------------------------------------------- decoding

    def _decode_parts(self) -> Iterator[StepPart]:
        """Decode one token for each sequence of the groups in which one does not pause. For those that join a
        batch now only the first step is launched.
        """
        decoder = self._running.decoder
        while decoder.queued:
            joining, partner = decoder.next_to_join()
            yield JoinBatch(
                tuple(sequence.number for sequence in joining), partner.number if partner else None
            )
        if groups := self.decoding:
            numbers = tuple(tuple(sequence.number for sequence in group.sequences) for group in groups)
            yield DecodeToken(numbers, self._draft_lengths())

    @property
    def decoding(self) -> list[BatchGroup]:
        """The groups that decode in this step: all in which a sequence does not pause."""
        groups = self._running.decoder.groups
        return [group for group in groups if not all(map(self._pauses, group.sequences))]

    def _draft_lengths(self) -> tuple[int, ...]:
        """Return how much to draft: nothing for several replies, which share the reads of the weights, and
        nothing for a reply with a guide where followers have none.
        """
        gain, running = self._resources.gain, self._running
        sequences, followers = running.decoder.sequences, self._resources.followers
        if gain is None or len(sequences) > 1 or running.prefills:
            return ()
        is_known_to_all = not (followers.are_there and sequences[0].is_guided)
        return gain.lengths() if is_known_to_all else ()
