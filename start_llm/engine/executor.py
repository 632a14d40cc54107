"""Do what `engine.planner` has decided: compute prompts and replies, and hand caches over."""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial

import mlx.core as mx

from start_llm.cache.opening import OpenedSequence
from start_llm.cache.pages import SequenceCache
from start_llm.core.engine_request import EngineRequest
from start_llm.core.thread_owners import ENGINE, owned_by
from start_llm.engine.admission import planned_tokens
from start_llm.engine.batch import BatchGroup, ReleasedCaches
from start_llm.engine.decoder import Decoder
from start_llm.engine.earlier_texts import EarlierTexts
from start_llm.engine.failures import Failures
from start_llm.engine.followers import ExecutorState
from start_llm.engine.generation import Generation
from start_llm.engine.image_reader import ImageReader
from start_llm.engine.prefill import Prefill
from start_llm.engine.reply_writer import ReplyWriter
from start_llm.engine.resources import EngineResources
from start_llm.engine.schedule import Schedule
from start_llm.engine.sequence import EngineSequence, Sampled
from start_llm.engine.step_plan import (
    ComputeChunk,
    ComputeChunks,
    DecodeToken,
    EndRequest,
    FreeMemory,
    JoinBatch,
    LookAtImage,
    PreemptRequest,
    PrefillPart,
    StartRequest,
    StepPart,
)
from start_llm.engine.time_share import EngineTime
from start_llm.telemetry.metrics import EngineMetrics

_FEW_REPLIES = 8
"""Replies at once whose readers are woken for each token."""


@owned_by(ENGINE)
class StepExecutor:
    """Has the sequences that run and the prompt cache, and executes the parts of steps.

    If a part raises, the caches of its sequences are discarded and all other sequences continue. A lone
    sequence fails; the sequences of a batch are retried one by one, so that only the faulty one fails.

    Args:
        schedule: has the requests that wait; a part takes its own by number.
        time: learns how long prefill and decoding take.

    Attributes:
        prefills: the prompts that are being computed: one, or several short ones together.
        decoder: the replies that are being decoded.
    """

    def __init__(
        self,
        resources: EngineResources,
        schedule: Schedule,
        time: EngineTime,
        metrics: EngineMetrics,
    ) -> None:
        self._resources = resources
        self._schedule = schedule
        self._time = time
        self._metrics = metrics
        self._clock = resources.clock
        self._reader = (
            ImageReader(resources.vision, metrics, resources.image_bytes) if resources.vision else None
        )
        self._starting: Generation | None = None  # taken from the schedule, not being prefilled yet
        self._starting_cache: SequenceCache | None = None  # what was restored for it
        self._earlier = EarlierTexts()
        self.cache = resources.cache
        self.failures = Failures(metrics, self.abandon_everything)
        self.prefills: list[Prefill] = []
        self.decoder = Decoder(resources)

    @property
    def running(self) -> list[EngineSequence]:
        return [*(prefill.sequence for prefill in self.prefills), *self.decoder.sequences]

    def state(self) -> ExecutorState:
        """Return what this executor has in common with another one that has done the same."""
        running = self.running
        return ExecutorState(
            running=len(running),
            tokens=sum(len(sequence.tokens) for sequence in running),
            computed=sum(prefill.done for prefill in self.prefills),
            free_bytes=self.cache.free_bytes,
            image_bytes=self._reader.kept_bytes if self._reader else 0,
        )

    def execute(self, part: StepPart, at: float) -> None:
        """Do a part of a step.

        Args:
            at: the plan's time. What is kept and evicted depends on it, and on no clock.
        """
        with self._clock.stopped(at):
            self._execute(part)

    def _execute(self, part: StepPart) -> None:
        match part:
            case EndRequest():
                self._end(part)
            case PreemptRequest():
                self._preempt(part)
            case StartRequest() | LookAtImage() | ComputeChunk() | ComputeChunks():
                self._go_on_with_prefill(part)
            case JoinBatch():
                self._join(part)
            case DecodeToken():
                self._decode(part)
            case FreeMemory():
                self.cache.batched_bytes = self.decoder.batched_bytes
                self.cache.shrink(part.shortage)

    # ---------------------------------------------------------------------------------------- end and preempt

    def _end(self, part: EndRequest) -> None:
        sequence = self._running_as(part.number)
        if sequence is None:
            waiting = self._schedule.drop(part.number)
            with self.failures.on_failure(partial(self.failures.add, [waiting.generation])):
                if waiting.sequence:
                    waiting.sequence.seq_cache.is_paused = False
                    if part.is_cut:
                        waiting.sequence.cut()
            waiting.generation.cancel()  # whoever waits for events of idle work that had no room sees it
            return
        with self.blaming(sequence):
            if part.is_cut:
                sequence.cut()
            self.take_out(sequence, is_given_up=part.is_given_up)

    def take_out(self, sequence: EngineSequence, *, is_given_up: bool = False) -> None:
        """Take a running sequence out of the engine. The cache keeps what it computed."""
        if self.decoder.contains(sequence):
            caches, count = self.decoder.remove(sequence)
            self.cache.batched_bytes = self.decoder.batched_bytes
            tokens = sequence.tokens[:count]
            self.cache.close(sequence.seq_cache, caches, tokens, is_given_up=is_given_up)
            sequence.leave_text()
        else:
            self._stop_prefill(sequence, is_given_up=is_given_up)

    def _stop_prefill(
        self, sequence: EngineSequence, *, is_given_up: bool = False, is_paused: bool = False
    ) -> None:
        """Stop prefilling in mid-prompt."""
        self._take_prefills([sequence.number])
        caches, tokens = sequence.layer_caches, sequence.seq_cache.tokens
        self.cache.close(sequence.seq_cache, caches, tokens, is_given_up=is_given_up, is_paused=is_paused)
        mx.clear_cache()

    def _preempt(self, part: PreemptRequest) -> None:
        """Let a request that runs wait.

        Raises:
            ValueError: it does not run.
        """
        sequence = self._running_as(part.number)
        if sequence is None:
            raise ValueError(f"request {part.number} does not run")
        with self.blaming(sequence):
            if self.decoder.contains(sequence):
                self._preempt_decoding(sequence, part.due)
            else:
                self._stop_prefill(sequence, is_paused=True)
                self._requeue(sequence, part.due)

    def _preempt_decoding(self, sequence: EngineSequence, due: float) -> None:
        """Take a sequence out of its batch in mid-reply."""
        held, sampled = self.decoder.release(sequence)
        self.cache.batched_bytes = self.decoder.batched_bytes
        self.cache.close(sequence.seq_cache, held.caches, sequence.tokens[: held.tokens], is_paused=True)
        has_ended = sampled is not None and self._append_token(sampled)
        sequence.generation.send()
        if has_ended:
            sequence.seq_cache.is_paused = False
            sequence.leave_text()
        else:
            self._requeue(sequence, due)
            self._metrics.preemptions += 1

    def _requeue(self, sequence: EngineSequence, due: float) -> None:
        sequence.pause(self._clock())
        self._schedule.requeue(sequence, due)

    # ------------------------------------------------------------------------------------------------ prefill

    def _go_on_with_prefill(self, part: PrefillPart) -> None:
        with self._time.decoding():
            self.wait_for_steps()  # their time does not count as the prompt's
        for sequence in self.decoder.sequences:
            sequence.generation.send()  # nothing is held while a reply pauses
        with (
            self._time.prefilling(is_shared=len(self.prefills) > 1),
            self.failures.on_failure(partial(self._abandon_prefill, part)),
        ):
            match part:
                case StartRequest():
                    self._start(part)
                case LookAtImage():
                    self._prefilled(part.number).look()
                case ComputeChunk():
                    prefill = self._prefilled(part.number)
                    self._note_chunk(prefill, self._time.compute_chunk(prefill, part.tokens))
                case ComputeChunks():
                    self._compute_chunks([self._prefilled(number) for number in part.numbers])

    def wait_for_steps(self) -> None:
        """Wait until every launched step has been computed."""
        for group in self.decoder.groups:
            with self.failures.on_failure(partial(self._abandon_group, group)):
                group.wait()

    def _start(self, part: StartRequest) -> None:
        """Restore the caches of a waiting request, and prefill what is left."""
        waiting = self._schedule.take(part.number)
        self._starting = waiting.generation
        sequence, positions = (
            self._reopen(waiting.sequence, part)
            if waiting.sequence
            else self._open_new(waiting.generation, part)
        )
        self.prefills.append(
            Prefill(
                self._resources,
                sequence,
                positions,
                self._reader,
                passes_checkpoints=self.cache.passes_checkpoints,
            )
        )
        self._starting = self._starting_cache = None
        self.report()

    def _open_new(self, generation: Generation, part: StartRequest) -> tuple[EngineSequence, tuple[int, ...]]:
        request = generation.request
        opened = self._opened(request, part.restored)
        self._starting_cache = opened.seq_cache
        reply = ReplyWriter(
            request,
            self._resources.token_bytes,
            self._resources.eos_token_ids,
            cached=len(opened.seq_cache.tokens),
        )
        generation.emit(replace(opened.restored, disk_tokens=part.disk_tokens, disk_s=part.disk_s))
        earlier = self._earlier if part.uses_earlier else None
        sequence = EngineSequence(
            generation, reply, opened.seq_cache, due=part.due, now=self._clock(), earlier=earlier
        )
        return sequence, opened.checkpoint_positions

    def _opened(self, request: EngineRequest, most: int) -> OpenedSequence:
        ids = request.prompt.ids
        if request.is_idle_work:
            return self.cache.opener.open_for_idle_work(ids, request.salt, request.boundaries, most=most)
        room = planned_tokens(request, len(ids))
        opened = self.cache.opener.open(
            ids, request.salt, request.boundaries, request.repeated_tokens, room, most=most
        )
        return self.cache.opener.with_kept(opened, ids, request.kept)

    def _reopen(self, sequence: EngineSequence, part: StartRequest) -> tuple[EngineSequence, tuple[int, ...]]:
        request = sequence.generation.request
        ids, room = tuple(sequence.tokens), planned_tokens(request, len(sequence.tokens))
        opened = self.cache.opener.reopen(
            ids, request.salt, request.boundaries, sequence.seq_cache, room, most=part.restored
        )
        self._starting_cache = opened.seq_cache
        sequence.resume(opened.seq_cache, self._clock())
        return sequence, opened.checkpoint_positions

    def _prefilled(self, number: int) -> Prefill:
        """Return the prompt of a request.

        Raises:
            ValueError: it is not being prefilled.
        """
        prefill = next(
            (candidate for candidate in self.prefills if candidate.sequence.number == number), None
        )
        if prefill is None:
            raise ValueError(f"request {number} is not being prefilled")
        return prefill

    def _compute_chunks(self, prefills: Sequence[Prefill]) -> None:
        lengths = self._time.compute_chunks(prefills)
        with self.cache.shrinking_once():
            for prefill, computed in zip(prefills, lengths, strict=True):
                self._note_chunk(prefill, computed)

    def _note_chunk(self, prefill: Prefill, computed: int) -> None:
        """Record that the next tokens of a prompt are computed. A prompt that is complete decodes."""
        sequence = prefill.sequence
        for start, end in prefill.pieces_since(prefill.done - computed):
            self.cache.record_chunk(
                sequence.seq_cache,
                sequence.tokens[start:end],
                keep_state=end in prefill.checkpoint_positions,
                ahead=prefill.done - end,
                decodes=not sequence.generation.request.is_prewarm,
            )
        if prefill.is_complete:
            self._end_prefill(sequence)

    def _end_prefill(self, sequence: EngineSequence) -> None:
        """Let the reply be decoded, or end a request for which nothing is generated."""
        if not sequence.generation.request.is_prewarm:
            self.decoder.add(sequence)
            self._take_prefills([sequence.number])
            return
        with self.blaming(sequence):
            self._stop_prefill(sequence)
            sequence.end_prewarm()

    # ----------------------------------------------------------------------------------------------- decoding

    def _join(self, part: JoinBatch) -> None:
        """Let prefilled requests decode.

        Raises:
            ValueError: they are not the next ones.
        """
        count = len(part.numbers)
        if [queued.number for queued in self.decoder.queued[:count]] != list(part.numbers):
            numbers = ", ".join(map(str, part.numbers))
            raise ValueError(f"request {numbers} is not the next to decode")
        with self._time.decoding(), self.failures.on_failure(self._abandon_joining):
            self.decoder.join_next(count, self._running_as(part.beside))

    def _decode(self, part: DecodeToken) -> None:
        with self._time.decoding():
            for numbers in part.groups:
                group = self.decoder.group_of(self._running_as(numbers[0]))
                if group:  # unless everything was abandoned since
                    with self.failures.on_failure(partial(self._abandon_group, group)):
                        self._step(group, part.draft_lengths)

    def _step(self, group: BatchGroup, draft_lengths: Sequence[int]) -> None:
        sampled = group.step(draft_lengths)
        ended = [result.sequence for result in sampled if self._accept(result)]
        self._send_tokens(sampled, ended)
        left = [sequence for sequence in ended if self.decoder.contains(sequence)]
        if left:  # unless everything was abandoned
            self._take_out_ended(group, left)

    def _send_tokens(self, sampled: Sequence[Sampled], ended: Collection[EngineSequence]) -> None:
        """Wake the readers of a step's tokens. Of many replies, only those for whom it is time."""
        is_crowd, now = len(sampled) > _FEW_REPLIES, self._clock.real()
        for result in sampled:
            sequence = result.sequence
            if is_crowd and sequence not in ended:
                sequence.generation.send_at_intervals(now)
            else:
                sequence.generation.send()

    def _accept(self, sampled: Sampled) -> bool:
        """Return True if this token ends its reply."""
        with self.blaming(sampled.sequence):
            return self.decoder.contains(sampled.sequence) and self._append_token(sampled)
        return False  # it has failed

    def _take_out_ended(self, group: BatchGroup, sequences: Sequence[EngineSequence]) -> None:
        """Take sequences that ended in one step out of their group, which is copied once for all of them."""
        released: list[ReleasedCaches] = []
        with self.failures.on_failure(partial(self._abandon_sequences, sequences)):
            released = self.decoder.remove_from(group, sequences)
            self.cache.batched_bytes = self.decoder.batched_bytes
        with self.cache.shrinking_once():
            for sequence, (caches, count) in zip(sequences, released, strict=False):
                with self.blaming(sequence):
                    self.cache.close(sequence.seq_cache, caches, sequence.tokens[:count])
                    sequence.leave_text()

    def _append_token(self, sampled: Sampled) -> bool:
        self._metrics.generated_tokens += 1
        return sampled.sequence.accept(
            sampled.token, sampled.scored, sampled.surprisal, is_drafted=sampled.is_drafted
        )

    def _running_as(self, number: int | None) -> EngineSequence | None:
        return next((sequence for sequence in self.running if sequence.number == number), None)

    # ----------------------------------------------------------------------------------------------- failures

    def blaming(self, sequence: EngineSequence) -> AbstractContextManager[None]:
        """If the block raises, this sequence alone fails."""
        return self.failures.on_failure(partial(self._abandon_sequences, [sequence]))

    def _fail(self, sequences: Sequence[EngineSequence]) -> None:
        """Fail these sequences and discard their caches, each of them even if another one raises."""
        self.failures.add(sequence.generation for sequence in sequences)
        with ExitStack() as discards:
            for sequence in sequences:
                discards.callback(self.cache.discard, sequence.seq_cache)

    def abandon_everything(self) -> None:
        """Fail every request, waiting ones too. What they computed is lost."""
        self.failures.add(self._schedule.take_all())
        sequences = [*self.decoder.abandon(), *self._take_prefills()]
        try:
            self._fail(sequences)
        finally:
            self._abandon_starting()

    def _abandon_sequences(self, sequences: Sequence[EngineSequence]) -> None:
        """Fail sequences. The others of a batch are retried if these were taken out of it by half, and
        everything fails if they cannot be taken out.
        """
        self._fail(sequences)
        broken = [group for group in self.decoder.groups if group.is_broken]
        for group in broken:
            others = [member for member in self.decoder.drop(group) if member not in sequences]
            self._retry_alone(others, are_innocent=True)
        if not broken:
            for sequence in sequences:
                self.decoder.remove(sequence)

    def _abandon_joining(self) -> None:
        self._retry_alone(self.decoder.drop_joining())

    def _abandon_group(self, group: BatchGroup) -> None:
        self._retry_alone(self.decoder.drop(group))

    def retry_decoding(self) -> None:
        """Retry, outside batches, each sequence that is being decoded: which one is at fault is not known."""
        self._retry_alone(self.decoder.abandon())

    def _retry_alone(self, sequences: list[EngineSequence], *, are_innocent: bool = False) -> None:
        """Discard the caches of a failed batch, and retry its sequences outside batches, so that only the
        faulty one fails again.

        Those fail now whose guide is ahead of their tokens, those that were retried before, and one that was
        alone, unless it is innocent.
        """
        self._fail(sequences)
        for sequence in sequences:
            is_suspect = sequence.excluded_from_batches or (len(sequences) == 1 and not are_innocent)
            if sequence.can_resume and not is_suspect:
                sequence.excluded_from_batches = True
                self._requeue(sequence, self._clock())
                self.failures.take_back(sequence.generation)

    def _abandon_starting(self) -> None:
        if self._starting is not None:
            self.failures.add([self._starting])
            self._starting = None
        if self._starting_cache is not None:
            self.cache.discard(self._starting_cache)
            self._starting_cache = None

    def _abandon_prefill(self, part: PrefillPart) -> None:
        match part:
            case StartRequest():
                self._abandon_starting()
            case ComputeChunks():
                self._retry_alone(self._take_prefills(part.numbers))
            case _:
                self._fail(self._take_prefills([part.number]))

    def _take_prefills(self, numbers: Collection[int] | None = None) -> list[EngineSequence]:
        """Take prompts out of prefill: those of these requests, or all."""
        sequences = [prefill.sequence for prefill in self.prefills]
        taken = [sequence for sequence in sequences if numbers is None or sequence.number in numbers]
        self.prefills = [prefill for prefill in self.prefills if prefill.sequence not in taken]
        return taken

    def report(self) -> None:
        """Tell the metrics what is waiting and running."""
        self._metrics.waiting = len(self._schedule)
        self._metrics.active_sequences = len(self.decoder.sequences)
        done, total = (sum(getattr(prefill, name) for prefill in self.prefills) for name in ("done", "total"))
        self._metrics.prefill = (done, total) if self.prefills else None
