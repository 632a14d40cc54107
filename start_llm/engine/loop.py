"""What the engine thread does, over and over."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import mlx.core as mx

from start_llm.cache.layers import Layers
from start_llm.cache.no_reuse import NoReuse
from start_llm.cache.pages import Strand
from start_llm.core.events import Failed
from start_llm.engine.admission import planned_tokens
from start_llm.engine.batch import Decoder, Group
from start_llm.engine.generation import Generation
from start_llm.engine.inbox import Asked, Inbox
from start_llm.engine.look import Look
from start_llm.engine.machinery import Machinery
from start_llm.engine.prefill import Prefill
from start_llm.engine.reply import ReplyWriter
from start_llm.engine.row import Row, Sampled
from start_llm.engine.schedule import Schedule, Waiting, due_with, goes_first
from start_llm.engine.time_share import EngineTime
from start_llm.telemetry.metrics import EngineMetrics

STOPPING = "The server is stopping."
_STEPS_BETWEEN_LOOKS = 64
_TIDYING_S = 0.01
"""Of a step, for what the cache has put off."""


class EngineLoop:
    """Owner of everything MLX: made, run and dropped on the engine thread.

    Prefill is serial. While replies run, its chunks take turns with decode steps, each for its share of the
    time. A row can be interrupted at any step: it comes to rest, the cache has what it computed, and it
    goes on when its turn comes again.

    Args:
        clock: seconds.
    """

    def __init__(
        self,
        machinery: Machinery,
        inbox: Inbox,
        metrics: EngineMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._machinery = machinery
        self._inbox = inbox
        self._metrics = metrics
        self._clock = clock
        self._schedule = Schedule(clock)
        self._time = EngineTime(machinery, metrics, clock)
        self._cache = machinery.cache or NoReuse(Layers(machinery.network))
        self._steps = 0
        self._starting: Waiting | None = None
        self._opened: Strand | None = None
        self._prefill: Prefill | None = None
        self._decoder = Decoder(machinery.network, machinery.batches, machinery.admission.holds)
        self._stopping = False

    def run(self) -> None:
        """Serve until asked to stop. Then, or if the thread dies, fail what is left: nobody waits forever."""
        try:
            while not self._stopping:
                self.step()
        finally:
            self._fail_the_rest()

    def _fail_the_rest(self) -> None:
        self._inbox.close()
        self._receive_all()
        for generation in self._abandon_everything():
            generation.emit(Failed(STOPPING))

    def step(self) -> None:
        self._receive()
        self._guarded(self._drop_cancelled, self._abandon_decoding)
        self._guarded(self._cut_overdue, self._abandon_decoding)
        self._guarded(self._make_room, self._abandon_decoding)
        if (self._prefill or self._startable) and self._time.is_prefills_turn(
            replies=bool(self._decoder.rows)
        ):
            self._prefill_some()
        self._decode()
        self._guarded(self._share_memory, list)
        self._report()

    # --------------------------------------------------------------------------------------- coming and going

    def _receive(self) -> None:
        """Take new requests; wait for one if there is nothing else to do."""
        if not (self._schedule or self._prefill or self._decoder.rows):
            self._time.rest()
            self._metrics.step_began = None
            asked = self._inbox.wait()
            self._metrics.step_began = time.monotonic()
            self._note(asked)
        self._metrics.step_began = time.monotonic()
        self._receive_all()
        self._metrics.waiting = len(self._schedule)

    def _receive_all(self) -> None:
        for asked in self._inbox.take_all():
            self._note(asked)

    def _note(self, asked: Asked) -> None:
        match asked:
            case Generation():
                self._schedule.add(asked, self._time.speed, self._prefill.row if self._prefill else None)
            case Look():
                self._guarded(partial(self._tell, asked), partial(self._cannot_tell, asked))
            case None:
                self._stopping = True

    def _tell(self, look: Look) -> None:
        job = look.job
        look.answer(self._cache.peek(job.prompt.ids, job.salt, job.boundaries, job.known))

    def _cannot_tell(self, look: Look) -> list[Generation]:
        look.answer(None)
        return []

    def _drop_cancelled(self) -> None:
        self._schedule.take_cancelled()
        if self._prefill and self._prefill.row.cancelled:
            self._guarded(self._leave_prefill, partial(self._abandon_row, self._prefill.row))
        for row in self._decoder.rows:
            if row.cancelled:
                self._guarded(partial(self._retire, row), partial(self._abandon_row, row))

    def _cut_overdue(self) -> None:
        """End the replies whose time is over; what was computed is kept."""
        running, now = self._running, self._clock()
        for row in [*self._schedule.interrupted, *running]:
            spent_s = row.spent_s(now if row in running else row.since)
            if 0 < self._machinery.pace.deadline_s < spent_s:
                row.cut()
                row.generation.cancel()
        self._drop_cancelled()

    @property
    def _running(self) -> list[Row]:
        return [*([self._prefill.row] if self._prefill else []), *self._decoder.rows]

    # --------------------------------------------------------------------------------------- whose turn it is

    def _make_room(self) -> None:
        """Interrupt who has to: for a short prompt, for those that wait for a place, for want of memory."""
        first = self._schedule.first
        prefill = self._prefill
        if first and prefill and self._cache.keeps:
            if goes_first(first, prefill.row, prefill.done) and self._has_room(first, self._decoder.rows):
                self._guarded(self._stop_prefill, partial(self._abandon_row, prefill.row))
        elif first and not prefill and not self._has_room(first, self._running):
            self._interrupt_longest_for(first)
        self._interrupt_beyond_memory()

    def _stop_prefill(self) -> None:
        """In the middle of a prompt; it goes on later."""
        if self._prefill is None:
            return
        row = self._prefill.row
        self._leave_prefill()
        row.pause(self._clock())
        self._schedule.put_back(row, row.due)

    def _leave_prefill(self) -> None:
        """Stop in the middle of a prompt, and keep what is computed of it."""
        if self._prefill:
            row, self._prefill = self._prefill.row, None
            self._cache.close(row.strand, row.cache, row.strand.tokens)
            mx.clear_cache()

    def _has_room(self, waiting: Waiting, beside: list[Row]) -> bool:
        has_place, job = len(beside) < self._machinery.most_rows, waiting.generation.job
        return has_place and self._machinery.admission.has_room(beside, job, waiting.tokens)

    def _interrupt_longest_for(self, first: Waiting) -> None:
        """The row that has had its turn for the longest time, if that is long enough."""
        rows, now = self._decoder.rows, self._clock()
        if not rows or now < first.due or not self._can_keep_all(first):
            return
        row = min(rows, key=lambda one: one.since)
        if now - row.since >= self._machinery.pace.turn_s:
            self._guarded(partial(self._interrupt, row), partial(self._abandon_row, row))

    def _can_keep_all(self, first: Waiting) -> bool:
        """Whether rows that take turns are still in memory when theirs comes again."""
        lengths = [len(row.tokens) for row in (*self._schedule.interrupted, *self._running)]
        newcomer = [] if first.row else [first.tokens]
        held = self._machinery.admission.held([*lengths, *newcomer])
        return self._cache.keeps and held <= self._cache.room_bytes

    def _interrupt_beyond_memory(self) -> None:
        """Rows have grown into what is there for all: the newest makes room for those that came before."""
        rows = self._decoder.rows
        lengths = [len(row.tokens) for row in self._running]
        if len(rows) > 1 and not self._machinery.admission.holds(lengths):
            newest = max(rows, key=lambda one: one.since)
            self._guarded(partial(self._interrupt, newest), partial(self._abandon_row, newest))

    def _interrupt(self, row: Row) -> None:
        """Take a row out in the middle of its reply; it goes on later."""
        held, sampled = self._decoder.release(row)
        self._cache.beside_bytes = self._decoder.batched_bytes
        self._cache.close(row.strand, held.caches, row.tokens[: held.tokens])
        if sampled is None or not self._has_ended(sampled):
            row.pause(self._clock())
            self._schedule.put_back(row)
            self._metrics.interruptions += 1

    # ------------------------------------------------------------------------------------------------ prefill

    @property
    def _startable(self) -> Waiting | None:
        first = self._schedule.first
        return first if first and self._has_room(first, self._running) else None

    def _start_next(self) -> None:
        if self._prefill or (first := self._startable) is None:
            return
        self._starting = first
        self._schedule.take(first)
        row, stops = self._continued(first.row) if first.row else self._opened_for(first)
        self._prefill = Prefill(self._machinery.network, row, stops)
        self._starting = self._opened = None
        self._report()

    def _opened_for(self, waiting: Waiting) -> tuple[Row, tuple[int, ...]]:
        job = waiting.generation.job
        ids, room = job.prompt.ids, planned_tokens(job, waiting.tokens)
        opened = self._cache.open(ids, job.salt, job.boundaries, job.known, room)
        self._opened = opened.strand
        cached = len(opened.strand.tokens)
        reply = ReplyWriter(job, self._machinery.token_bytes, self._machinery.end_tokens, cached=cached)
        due = due_with(waiting, cached, self._time.speed)
        row = Row(waiting.generation, reply, opened.strand, due=due, now=self._clock())
        row.generation.emit(opened.restored)
        return row, opened.stops

    def _continued(self, row: Row) -> tuple[Row, tuple[int, ...]]:
        job = row.generation.job
        told = len(row.tokens) if row.has_begun else row.strand.known
        ids, room = tuple(row.tokens), planned_tokens(job, len(row.tokens))
        opened = self._cache.reopen(ids, job.salt, job.boundaries, told, len(job.prompt), room)
        self._opened = opened.strand
        row.go_on(opened.strand, self._clock())
        return row, opened.stops

    def _prefill_some(self) -> None:
        """One chunk of a long prompt, or as many short prompts as take no longer."""
        self._guarded(self._finish_steps, self._abandon_decoding)
        with self._time.prefilling(replies=bool(self._decoder.rows)) as fits:
            self._guarded(self._start_next, self._abandon_starting)
            while prefill := self._prefill:
                self._guarded(self._prefill_chunk, self._abandon_prefill)
                if not prefill.is_complete:
                    return
                self._guarded(self._start_next, self._abandon_starting)
                if not fits(self._prefill):
                    return

    def _finish_steps(self) -> None:
        """Wait for the steps that are on their way, whose time is not the chunk's."""
        with self._time.decoding():
            self._decoder.wait()

    def _prefill_chunk(self) -> None:
        if self._prefill is None:
            return
        computed = self._time.compute_chunk(self._prefill, replies=bool(self._decoder.rows))
        row, done = self._prefill.row, self._prefill.done
        self._cache.grew(row.strand, row.tokens[done - computed : done], keep_state=self._prefill.is_at_stop)
        if self._prefill.is_complete:
            self._prefill = None
            self._decoder.add(row)

    # ----------------------------------------------------------------------------------------------- decoding

    def _decode(self) -> None:
        """One token for each row, but for those that have just joined others."""
        with self._time.decoding():
            while self._decoder.next_to_start:
                self._guarded(self._decoder.start_next, self._abandon_joining)
            for group in self._decoder.groups:
                self._guarded(partial(self._step, group), partial(self._abandon_group, group))
        self._time.note_step(replies=bool(self._decoder.groups))

    def _step(self, group: Group) -> None:
        if group in self._decoder.groups:  # else a failure of another one has taken all with it
            self._accept_all(group.step())

    def _accept_all(self, all_sampled: list[Sampled]) -> None:
        for sampled in all_sampled:
            self._guarded(partial(self._accept, sampled), partial(self._abandon_row, sampled.row))

    def _accept(self, sampled: Sampled) -> None:
        if self._decoder.holds(sampled.row) and self._has_ended(sampled):
            self._retire(sampled.row)

    def _has_ended(self, sampled: Sampled) -> bool:
        self._metrics.generated_tokens += 1
        return sampled.row.accept(sampled.token, sampled.scored, sampled.surprisal)

    def _retire(self, row: Row) -> None:
        """Take a row out of the decoder, and give what it computed to the cache."""
        if self._decoder.holds(row):
            caches, tokens = self._decoder.remove(row)
            self._cache.beside_bytes = self._decoder.batched_bytes
            self._cache.close(row.strand, caches, row.tokens[:tokens])

    def _share_memory(self) -> None:
        """Let the cache give way to what rows hold in batches, and to what they have grown by."""
        self._steps += 1
        batched, is_time = self._decoder.batched_bytes, self._steps % _STEPS_BETWEEN_LOOKS == 0
        if batched != self._cache.beside_bytes or is_time:
            self._cache.beside_bytes = batched
            self._cache.shrink(self._machinery.shortage() if is_time else 0)
        self._cache.tidy(_TIDYING_S)

    # ----------------------------------------------------------------------------------------------- failures

    def _guarded(self, action: Callable[[], None], abandon: Callable[[], list[Generation]]) -> None:
        """Run `action`; if it fails, the requests that it held fail with it and the loop goes on."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever a network raises, the other requests must live
            self._metrics.failures += 1
            for generation in self._abandoned(abandon):
                generation.emit(Failed(f"The engine failed: {type(error).__name__}: {error}"))
            mx.clear_cache()

    def _abandoned(self, abandon: Callable[[], list[Generation]]) -> list[Generation]:
        try:
            return abandon()
        except Exception:  # noqa: BLE001 - then nothing that runs can be trusted, and what comes next must live
            return self._abandon_everything()

    def _abandon_everything(self) -> list[Generation]:
        waiting = self._schedule.take_all()
        rows = self._decoder.abandon()
        for row in rows:
            self._cache.discard(row.strand)
        lost = [*self._abandon_starting(), *self._abandon_prefill(), *waiting]
        return [*lost, *(row.generation for row in rows)]

    def _abandon_row(self, row: Row) -> list[Generation]:
        """If it cannot even be taken out, all others go with it."""
        self._cache.discard(row.strand)
        try:
            self._decoder.remove(row)
        except Exception:  # noqa: BLE001 - as in `_abandoned`, but this row may be gone from its group already
            return [*{row.generation, *self._abandon_everything()}]
        return [row.generation]

    def _abandon_joining(self) -> list[Generation]:
        return self._tried_alone(self._decoder.drop_starting())

    def _abandon_group(self, group: Group) -> list[Generation]:
        return self._tried_alone(self._decoder.drop(group))

    def _abandon_decoding(self) -> list[Generation]:
        return self._tried_alone(self._decoder.abandon())

    def _tried_alone(self, rows: list[Row]) -> list[Generation]:
        """Of several rows nobody knows which one is to blame: each goes on alone, and the one will fail."""
        for row in rows:
            self._cache.discard(row.strand)
        going_on = [row for row in rows if len(rows) > 1 and row.can_go_on]
        for row in going_on:
            row.is_alone = True
            row.pause(self._clock())
            self._schedule.put_back(row)
        return [row.generation for row in rows if row not in going_on]

    def _abandon_starting(self) -> list[Generation]:
        dropped, self._starting = self._starting, None
        if self._opened is not None:
            self._cache.discard(self._opened)
            self._opened = None
        return [dropped.generation] if dropped else []

    def _abandon_prefill(self) -> list[Generation]:
        rows, self._prefill = [self._prefill.row] if self._prefill else [], None
        for row in rows:
            self._cache.discard(row.strand)
        return [row.generation for row in rows]

    def _report(self) -> None:
        self._metrics.waiting = len(self._schedule)
        self._metrics.active_rows = len(self._decoder.rows)
        self._metrics.prefill = (self._prefill.done, self._prefill.total) if self._prefill else None
