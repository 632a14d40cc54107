"""What the engine thread does, over and over."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from start_llm.cache.layers import Layers
from start_llm.cache.pages import Strand
from start_llm.cache.prompt_cache import NoReuse, PromptCache
from start_llm.core.events import Failed
from start_llm.engine.batch import Decoder
from start_llm.engine.generation import Generation
from start_llm.engine.look import Look
from start_llm.engine.prefill import ChunkPacer, Prefill
from start_llm.engine.reply import ReplyWriter
from start_llm.engine.row import Row, Sampled
from start_llm.telemetry.metrics import EngineMetrics

type Inbox = queue.SimpleQueue[Generation | Look | None]
"""Requests and questions from HTTP threads; None asks the engine to stop."""


STOPPING = "The server is stopping."
_STEPS_BETWEEN_LOOKS = 64


@dataclass(frozen=True, slots=True)
class Machinery:
    """What the loop runs.

    Attributes:
        network: `network(tokens[1, n], cache=...)` gives logits [1, n, vocabulary].
        token_bytes, end_tokens: see `models.tokenizer`.
        cache: what was computed before.
        most_rows: rows that decode at once.
        batches: whether the network's caches can be merged.
    """

    network: Any
    token_bytes: Callable[[int], bytes]
    end_tokens: frozenset[int]
    most_rows: int
    batches: bool
    cache: PromptCache | NoReuse | None = None


class EngineLoop:
    """Owner of everything MLX: made, run and dropped on the engine thread.

    Prefill is serial and first come, first served; one chunk's worth of it alternates with one decode step.
    """

    def __init__(self, machinery: Machinery, inbox: Inbox, metrics: EngineMetrics) -> None:
        self._machinery = machinery
        self._inbox = inbox
        self._metrics = metrics
        self._waiting: deque[Generation] = deque()
        self._pacer = ChunkPacer()
        self._allowance = 0
        self._cache = machinery.cache or NoReuse(Layers(machinery.network))
        self._steps = 0
        self._starting: Generation | None = None
        self._opened: Strand | None = None
        self._prefill: Prefill | None = None
        self._decoder = Decoder(machinery.network, most_rows=machinery.most_rows, batches=machinery.batches)
        self._stopping = False

    def run(self) -> None:
        """Serve until asked to stop. Then, or if the thread dies, fail what is left: nobody waits forever."""
        try:
            while not self._stopping:
                self.step()
        finally:
            self._fail_the_rest()

    def _fail_the_rest(self) -> None:
        self._receive_all()
        left = [*self._abandon_starting(), *self._abandon_prefill(), *self._waiting]
        for generation in [*left, *(row.generation for row in self._decoder.rows)]:
            generation.emit(Failed(STOPPING))
        self._decoder.close()

    def step(self) -> None:
        self._receive()
        self._guarded(self._drop_cancelled, self._abandon_decoding)
        self._prefill_some()
        self._guarded(self._decode_step, self._abandon_decoding)
        self._guarded(self._share_memory, list)
        self._report()

    def _receive(self) -> None:
        """Take new requests; wait for one if there is nothing else to do."""
        if not (self._waiting or self._prefill or self._decoder.rows):
            self._note(self._inbox.get())
        self._receive_all()
        self._metrics.waiting = len(self._waiting)

    def _receive_all(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._note(self._inbox.get_nowait())

    def _note(self, request: Generation | Look | None) -> None:
        match request:
            case Generation():
                self._waiting.append(request)
            case Look():
                self._guarded(partial(self._tell, request), partial(self._cannot_tell, request))
            case None:
                self._stopping = True

    def _tell(self, look: Look) -> None:
        job = look.job
        look.answer(self._cache.peek(job.prompt.ids, job.salt, job.boundaries, job.known))

    def _cannot_tell(self, look: Look) -> list[Generation]:
        look.answer(None)
        return []

    def _drop_cancelled(self) -> None:
        self._waiting = deque(request for request in self._waiting if not request.cancelled)
        if self._prefill and self._prefill.row.cancelled:
            self._guarded(partial(self._leave, self._prefill.row), self._abandon_prefill)
        for row in self._decoder.rows:
            if row.cancelled:
                self._guarded(partial(self._retire, row), partial(self._abandon_row, row))

    def _leave(self, row: Row) -> None:
        """Stop in the middle of a prompt, and keep what is computed of it."""
        self._cache.close(row.strand, row.cache, row.strand.tokens)
        self._prefill = None
        mx.clear_cache()

    def _start_next(self) -> None:
        if self._prefill or not self._waiting or len(self._decoder.rows) >= self._machinery.most_rows:
            return
        self._starting = self._waiting.popleft()
        self._metrics.waiting = len(self._waiting)
        job = self._starting.job
        opened = self._cache.open(job.prompt.ids, job.salt, job.boundaries, job.known)
        self._opened = opened.strand
        reply = ReplyWriter(
            job,
            self._machinery.token_bytes,
            self._machinery.end_tokens,
            cached=len(opened.strand.tokens),
        )
        row = Row(self._starting, reply, opened.strand)
        row.generation.emit(opened.restored)
        self._prefill = Prefill(self._machinery.network, row, self._pacer, opened.stops)
        self._starting = self._opened = None

    def _prefill_some(self) -> None:
        """One chunk of a long prompt, or as many short prompts as take no longer."""
        self._allowance = self._pacer.length
        self._guarded(self._start_next, self._abandon_starting)
        while self._prefill is not None:
            self._guarded(self._prefill_chunk, self._abandon_prefill)
            self._guarded(self._start_next, self._abandon_starting)
            if self._prefill and self._prefill.remaining > self._allowance:
                return

    def _prefill_chunk(self) -> None:
        if self._prefill is None:
            return
        computed = self._prefill.step(self._allowance)
        self._allowance -= computed
        self._metrics.prefilled_tokens += computed
        row, done = self._prefill.row, self._prefill.done
        self._cache.grew(row.strand, row.tokens[done - computed : done], keep_state=self._prefill.is_at_stop)
        if self._prefill.is_complete:
            self._prefill = None
            self._decoder.add(row)

    def _decode_step(self) -> None:
        for sampled in self._decoder.step():
            self._metrics.generated_tokens += 1
            self._guarded(partial(self._accept, sampled), partial(self._abandon_row, sampled.row))

    def _share_memory(self) -> None:
        """Let the cache give way to what rows hold in batches, and to what they have grown by."""
        self._steps += 1
        batched = self._decoder.batched_bytes
        if batched != self._cache.beside_bytes or self._steps % _STEPS_BETWEEN_LOOKS == 0:
            self._cache.beside_bytes = batched
            self._cache.shrink()

    def _accept(self, sampled: Sampled) -> None:
        row, token, logprobs = sampled
        if row.accept(token, logprobs):
            self._retire(row)

    def _retire(self, row: Row) -> None:
        """Take a row out of the decoder, and give what it computed to the cache."""
        caches, tokens = self._decoder.remove(row)
        self._cache.beside_bytes = self._decoder.batched_bytes
        self._cache.close(row.strand, caches, row.tokens[:tokens])

    def _abandon_row(self, row: Row) -> list[Generation]:
        self._decoder.remove(row)
        self._cache.discard(row.strand)
        return [row.generation]

    def _guarded(self, action: Callable[[], None], abandon: Callable[[], list[Generation]]) -> None:
        """Run `action`; if it fails, the requests that it held fail with it and the loop goes on."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever a network raises, the other requests must live
            self._metrics.failures += 1
            for generation in abandon():
                generation.emit(Failed(f"The engine failed: {type(error).__name__}: {error}"))
            mx.clear_cache()

    def _abandon_starting(self) -> list[Generation]:
        dropped, self._starting = self._starting, None
        strand, self._opened = self._opened, None
        if strand is not None:
            self._cache.discard(strand)
        return [dropped] if dropped else []

    def _abandon_prefill(self) -> list[Generation]:
        dropped, self._prefill = self._prefill, None
        if dropped is None:
            return []
        self._cache.discard(dropped.row.strand)
        return [dropped.row.generation]

    def _abandon_decoding(self) -> list[Generation]:
        rows = self._decoder.abandon()
        for row in rows:
            self._cache.discard(row.strand)
        return [row.generation for row in rows]

    def _report(self) -> None:
        self._metrics.waiting = len(self._waiting)
        self._metrics.active_rows = len(self._decoder.rows)
        self._metrics.prefill = (self._prefill.done, self._prefill.total) if self._prefill else None
