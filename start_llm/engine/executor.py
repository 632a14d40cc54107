"""Do what `engine.planner` has decided: compute prompts and replies, and hand caches over."""

from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import mlx.core as mx

from start_llm.cache.opening import OpenedSequence
from start_llm.core.engine_request import EngineRequest
from start_llm.core.thread_owners import ENGINE, owned_by
from start_llm.engine.admission import planned_tokens
from start_llm.engine.batch import BatchGroup, ReleasedCaches
from start_llm.engine.earlier_texts import EarlierTexts
from start_llm.engine.followers import ExecutorState
from start_llm.engine.generation import Generation
from start_llm.engine.image_reader import ImageReader
from start_llm.engine.prefill import Prefill
from start_llm.engine.recovery import Recovery
from start_llm.engine.reply_writer import ReplyWriter
from start_llm.engine.resources import EngineResources
from start_llm.engine.running import RunningSequences
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
    """Executes the parts of steps. Whatever the work of a sequence raises, all others continue.

    Args:
        schedule: has the requests that wait; a part takes its own by number.
        time: learns how long prefill and decoding take.

    Attributes:
        running: the sequences that run.
        recovery: what becomes of them if a part raises.
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
        self._earlier = EarlierTexts()
        self._cache = resources.cache
        self.running = RunningSequences(resources)
        self.recovery = Recovery(self.running, self._cache, schedule, metrics)
        self._failures = self.recovery.failures

    def state(self) -> ExecutorState:
        """Return what this executor has in common with another one that has done the same."""
        running = self.running.sequences
        return ExecutorState(
            running=len(running),
            tokens=sum(len(sequence.tokens) for sequence in running),
            computed=sum(prefill.done for prefill in self.running.prefills),
            free_bytes=self._cache.free_bytes,
            image_bytes=self._reader.kept_bytes if self._reader else 0,
        )

    def execute(self, part: StepPart, at: float) -> None:
        """Do a part of a step.

        Args:
            at: the plan's time. What is kept and evicted depends on it, and on no clock.

        Raises:
            ValueError: the part is of a request that is not there, or not next.
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
                self.running.note_batched_bytes()
                self._cache.shrink(part.shortage)

    # ---------------------------------------------------------------------------------------- end and preempt

    def _end(self, part: EndRequest) -> None:
        sequence = self.running.numbered(part.number)
        if sequence is None:
            waiting = self._schedule.drop(part.number)
            with self._failures.on_failure(partial(self._failures.add, [waiting.generation])):
                if waiting.sequence:
                    waiting.sequence.seq_cache.is_paused = False
                    if part.is_cut:
                        waiting.sequence.cut()
            waiting.generation.cancel()  # whoever waits for events of idle work that had no room sees it
            return
        with self._evicting_once(), self.recovery.blaming(sequence):
            if part.is_cut:
                sequence.cut()
            self.take_out(sequence, is_given_up=part.is_given_up)

    def take_out(self, sequence: EngineSequence, *, is_given_up: bool = False) -> None:
        """Take a running sequence out of the engine. The cache keeps what it computed."""
        if self.running.decoder.contains(sequence):
            caches, count = self.running.decoder.remove(sequence)
            self.running.note_batched_bytes()
            tokens = sequence.tokens[:count]
            self._cache.close(sequence.seq_cache, caches, tokens, is_given_up=is_given_up)
            sequence.leave_text()
        else:
            self._stop_prefill(sequence, is_given_up=is_given_up)

    def _stop_prefill(
        self, sequence: EngineSequence, *, is_given_up: bool = False, is_paused: bool = False
    ) -> None:
        """Stop prefilling in mid-prompt."""
        self.running.take_prefills([sequence.number])
        caches, tokens = sequence.layer_caches, sequence.seq_cache.tokens
        self._cache.close(sequence.seq_cache, caches, tokens, is_given_up=is_given_up, is_paused=is_paused)
        mx.clear_cache()

    def _preempt(self, part: PreemptRequest) -> None:
        """Let a request that runs wait.

        Raises:
            ValueError: it does not run.
        """
        sequence = self.running.numbered(part.number)
        if sequence is None:
            raise ValueError(f"request {part.number} does not run")
        with self._evicting_once(), self.recovery.blaming(sequence):
            if group := self.running.decoder.group_of(sequence):
                self._wait_for(group)  # a step that has failed is its group's, and not this sequence's
            if self.running.decoder.contains(sequence):
                self._preempt_decoding(sequence, part.due)
            elif not group:
                self._stop_prefill(sequence, is_paused=True)
                self._schedule.requeue(sequence, part.due)

    def _preempt_decoding(self, sequence: EngineSequence, due: float) -> None:
        """Take a sequence out of its batch in mid-reply."""
        held, sampled = self.running.decoder.release(sequence)
        self.running.note_batched_bytes()
        self._cache.close(sequence.seq_cache, held.caches, sequence.tokens[: held.tokens], is_paused=True)
        has_ended = sampled is not None and self._append_token(sampled)
        sequence.generation.send()
        if has_ended:
            sequence.seq_cache.is_paused = False
            sequence.leave_text()
        else:
            self._schedule.requeue(sequence, due)
            self._metrics.preemptions += 1

    # ------------------------------------------------------------------------------------------------ prefill

    def _go_on_with_prefill(self, part: PrefillPart) -> None:
        with self._time.decoding():
            self.wait_for_steps()  # their time does not count as the prompt's
        for sequence in self.running.decoder.sequences:
            sequence.generation.send()  # nothing is held while a reply pauses
        with (
            self._time.prefilling(is_shared=len(self.running.prefills) > 1),
            self._evicting_once(),
            self._failures.on_failure(partial(self.recovery.abandon_prefill, part)),
        ):
            match part:
                case StartRequest():
                    self._start(part)
                case LookAtImage():
                    self.running.prefill_of(part.number).look()
                case ComputeChunk():
                    prefill = self.running.prefill_of(part.number)
                    self._note_chunk(prefill, self._time.compute_chunk(prefill, part.tokens))
                case ComputeChunks():
                    self._compute_chunks([self.running.prefill_of(number) for number in part.numbers])

    def wait_for_steps(self) -> None:
        """Wait until every launched step has been computed."""
        for group in self.running.decoder.groups:
            self._wait_for(group)

    def _wait_for(self, group: BatchGroup) -> None:
        with self._failures.on_failure(partial(self.recovery.retry_group, group)):
            group.wait()

    def _start(self, part: StartRequest) -> None:
        """Restore the caches of a waiting request, and prefill what is left."""
        waiting = self._schedule.take(part.number)
        self.running.starting = waiting.generation
        sequence, positions = (
            self._reopen(waiting.sequence, part)
            if waiting.sequence
            else self._open_new(waiting.generation, part)
        )
        self.running.prefills.append(
            Prefill(
                self._resources,
                sequence,
                positions,
                self._reader,
                passes_checkpoints=self._cache.passes_checkpoints,
            )
        )
        self.running.starting = self.running.starting_cache = None
        self.report()

    def _open_new(self, generation: Generation, part: StartRequest) -> tuple[EngineSequence, tuple[int, ...]]:
        request = generation.request
        opened = self._opened(request, part.restored)
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
            opened = self._cache.opener.open_for_idle_work(ids, request.salt, request.boundaries, most=most)
            self.running.starting_cache = opened.seq_cache
            return opened
        room = planned_tokens(request, len(ids))
        opened = self._cache.opener.open(
            ids, request.salt, request.boundaries, request.repeated_tokens, room, most=most
        )
        self.running.starting_cache = opened.seq_cache
        return self._cache.opener.with_kept(opened, ids, request.kept)

    def _reopen(self, sequence: EngineSequence, part: StartRequest) -> tuple[EngineSequence, tuple[int, ...]]:
        request = sequence.generation.request
        ids, room = tuple(sequence.tokens), planned_tokens(request, len(sequence.tokens))
        opened = self._cache.opener.reopen(
            ids, request.salt, request.boundaries, sequence.seq_cache, room, most=part.restored
        )
        self.running.starting_cache = opened.seq_cache
        sequence.resume(opened.seq_cache, self._clock())
        return sequence, opened.checkpoint_positions

    def _compute_chunks(self, prefills: Sequence[Prefill]) -> None:
        lengths = self._time.compute_chunks(prefills)
        for prefill, computed in zip(prefills, lengths, strict=True):
            self._note_chunk(prefill, computed)

    def _note_chunk(self, prefill: Prefill, computed: int) -> None:
        """Record that the next tokens of a prompt are computed. A prompt that is complete decodes."""
        sequence = prefill.sequence
        for start, end in prefill.pieces_since(prefill.done - computed):
            self._cache.record_chunk(
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
            self.running.decoder.add(sequence)
            self.running.take_prefills([sequence.number])
            return
        with self.recovery.blaming(sequence):
            self._stop_prefill(sequence)
            sequence.end_prewarm()

    # ----------------------------------------------------------------------------------------------- decoding

    def _join(self, part: JoinBatch) -> None:
        """Let prefilled requests decode.

        Raises:
            ValueError: they are not the next ones.
        """
        count = len(part.numbers)
        if [queued.number for queued in self.running.decoder.queued[:count]] != list(part.numbers):
            numbers = ", ".join(map(str, part.numbers))
            raise ValueError(f"request {numbers} is not the next to decode")
        with self._time.decoding(), self._failures.on_failure(self.recovery.retry_joining):
            self.running.decoder.join_next(count, self.running.numbered(part.beside))
            self.running.note_batched_bytes()

    def _decode(self, part: DecodeToken) -> None:
        is_crowd = len(self.running.decoder.sequences) > _FEW_REPLIES
        with self._time.decoding():
            for numbers in part.groups:
                group = self.running.decoder.group_of(self.running.numbered(numbers[0]))
                if group:  # unless everything was abandoned since
                    with self._failures.on_failure(partial(self.recovery.retry_group, group)):
                        self._step(group, part.draft_lengths, is_crowd=is_crowd)

    def _step(self, group: BatchGroup, draft_lengths: Sequence[int], *, is_crowd: bool) -> None:
        sampled = group.step(draft_lengths)
        ended = [result.sequence for result in sampled if self._accept(result)]
        self._send_tokens(sampled, ended, is_crowd=is_crowd)
        left = [sequence for sequence in ended if self.running.decoder.contains(sequence)]
        if left:  # unless everything was abandoned
            self._take_out_ended(group, left)

    def _send_tokens(
        self, sampled: Sequence[Sampled], ended: Collection[EngineSequence], *, is_crowd: bool
    ) -> None:
        """Wake the readers of a step's tokens. Of many replies, only those for whom it is time."""
        now = self._clock.real()
        for result in sampled:
            sequence = result.sequence
            if is_crowd and sequence not in ended:
                sequence.generation.send_at_intervals(now)
            else:
                sequence.generation.send()

    def _accept(self, sampled: Sampled) -> bool:
        """Return True if this token ends its reply."""
        with self.recovery.blaming(sampled.sequence):
            return self.running.decoder.contains(sampled.sequence) and self._append_token(sampled)
        return False  # it has failed

    def _take_out_ended(self, group: BatchGroup, sequences: Sequence[EngineSequence]) -> None:
        """Take sequences that ended in one step out of their group, which is copied once for all of them."""
        released: list[ReleasedCaches] = []
        with self._failures.on_failure(partial(self.recovery.abandon_sequences, sequences)):
            released = self.running.decoder.remove_from(group, sequences)
            self.running.note_batched_bytes()
        with self._evicting_once():
            for sequence, (caches, count) in zip(sequences, released, strict=False):
                with self.recovery.blaming(sequence):
                    self._cache.close(sequence.seq_cache, caches, sequence.tokens[:count])
                    sequence.leave_text()

    @contextmanager
    def _evicting_once(self) -> Generator[None]:
        """Evict behind the block, once for all of its sequences. None of them is at fault if that fails."""
        try:
            with self._cache.shrinking_later():
                yield
        finally:
            with self._failures.on_failure():
                self._cache.shrink_if_due()

    def _append_token(self, sampled: Sampled) -> bool:
        self._metrics.generated_tokens += 1
        return sampled.sequence.accept(
            sampled.token, sampled.scored, sampled.surprisal, is_drafted=sampled.is_drafted
        )

    def report(self) -> None:
        """Tell the metrics what is waiting and running."""
        self._metrics.waiting = len(self._schedule)
        self._metrics.active_sequences = len(self.running.decoder.sequences)
        done, total = (
            sum(getattr(prefill, name) for prefill in self.running.prefills) for name in ("done", "total")
        )
        self._metrics.prefill = (done, total) if self.running.prefills else None
