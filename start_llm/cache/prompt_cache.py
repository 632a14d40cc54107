"""Computed prompts, kept and given back.

    open       what is known of a prompt, as caches that go on from there
    grew       a chunk was computed: its pages can be shared from now on
    close      the row is gone: its caches rest, or become a run
    shrink     back within the limits

Owned by the engine thread.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from start_llm.cache.checkpoints import places, superseded
from start_llm.cache.eviction import Evictor, Limits
from start_llm.cache.layers import Layers
from start_llm.cache.ledger import Ledger
from start_llm.cache.pages import Checkpoint, Page, Strand
from start_llm.cache.plan import Plan, kept_length, plan_restore
from start_llm.cache.restore import Restorer
from start_llm.cache.store import Store
from start_llm.core.events import Miss, Restored
from start_llm.telemetry.metrics import CacheMetrics


@dataclass(frozen=True, slots=True)
class Opened:
    """Caches for a prompt.

    Attributes:
        strand: live; its `tokens` are what needs no computing.
        stops: positions at which prefill has to stop, so that state can be kept there.
        restored: the same, for whoever asked.
    """

    strand: Strand
    stops: tuple[int, ...]
    restored: Restored


class _Found(NamedTuple):
    """What there is of a prompt.

    Attributes:
        matched: the full pages that it begins with.
    """

    matched: list[Page]
    plan: Plan
    restored: Restored


class PromptCache:
    """All state of one network that outlives its request.

    Args:
        identity: of the weights and of everything else that KV depends on; see `models.identity`.
        page_size: tokens of a full page.
        clock: seconds.

    Attributes:
        keeps: what is computed can be had again.
    """

    keeps = True

    def __init__(
        self,
        layers: Layers,
        *,
        limits: Limits,
        page_size: int,
        metrics: CacheMetrics,
        identity: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.identity = identity
        self._layers = layers
        self._store = Store(layers, page_size)
        self._evictor = Evictor(self._store, limits)
        self._restorer = Restorer(layers, self._store, self._evictor, self._make_room)
        self._ledger = Ledger(page_size)
        self._metrics = metrics
        self._clock = clock

    # ---------------------------------------------------------------------------------------------- a request

    def open(
        self, ids: tuple[int, ...], salt: bytes, boundaries: Sequence[int], told: int = 0, room: int = 0
    ) -> Opened:
        """Restore the longest known beginning of `ids`, at least one token short of all.

        Args:
            salt: what is stored under one is never found under another.
            boundaries: ends of the messages, ascending, in tokens.
            told: tokens that stand for messages which were computed before, spelled otherwise perhaps.
            room: tokens that the caches should take without growing: the prompt, and some of the reply.
        """
        opened, plan = self._open(ids, salt, boundaries, told, len(ids), room)
        self._note_lookup(plan, opened.restored)
        return opened

    def reopen(
        self,
        ids: tuple[int, ...],
        salt: bytes,
        boundaries: Sequence[int],
        told: int,
        prompt_length: int,
        room: int = 0,
    ) -> Opened:
        """The same for a row that was interrupted: part of its reply may stand behind its prompt."""
        return self._open(ids, salt, boundaries, told, prompt_length, room)[0]

    def _open(
        self,
        ids: tuple[int, ...],
        salt: bytes,
        boundaries: Sequence[int],
        told: int,
        prompt_length: int,
        room: int,
    ) -> tuple[Opened, Plan]:
        now, root = self._clock(), self._root(salt)
        found = self._find(root, ids, boundaries, told)
        plan = found.plan
        self._use(plan, now)
        strand = self._restorer.restore(plan, root, ids, room)
        strand.last_used = now
        strand.boundaries = _ends(ids, boundaries)
        prompt_end = strand.boundaries[-1] if strand.boundaries else prompt_length - 1
        strand.shared_to = max(strand.shared_to, prompt_end)
        strand.prompt_length = prompt_length
        strand.known = found.restored.known
        return Opened(strand, self._stops(strand, found.matched), found.restored), plan

    def peek(self, ids: tuple[int, ...], salt: bytes, boundaries: Sequence[int], told: int = 0) -> Restored:
        """What `open` would restore. Nothing changes, and nothing is counted."""
        rejected = self._store.tree.rejected_keys
        found = self._find(self._root(salt), ids, boundaries, told)
        self._store.tree.rejected_keys = rejected
        return found.restored

    def _find(self, root: Page, ids: tuple[int, ...], boundaries: Sequence[int], told: int) -> _Found:
        rejected = self._store.tree.rejected_keys
        matched = self._store.tree.match(root, ids[:-1])
        plan = plan_restore(root, matched, ids, has_state=self._layers.has_state)
        kept = kept_length(root, matched, ids)
        last = matched[-1] if matched else root
        once = max(self._ledger.known(last, ids[:-1], _ends(ids, boundaries)), plan.length)
        known = max(once, min(told, len(ids) - 1))
        restored = Restored(
            plan.length,
            _miss(plan, known=known, kept=kept, once=once),
            rejected_keys=self._store.tree.rejected_keys - rejected,
            kept=max(kept, plan.length),
            known=known,
        )
        return _Found(matched, plan, restored)

    def _root(self, salt: bytes) -> Page:
        """Two digests of equal length: no salt can look like the end of an identity."""
        parts = (hashlib.blake2b(part, digest_size=16).digest() for part in (self.identity, salt))
        return self._store.tree.root(b"".join(parts))

    def _stops(self, strand: Strand, matched: list[Page]) -> tuple[int, ...]:
        if not self._layers.has_state:
            return ()
        deepest = len(matched) * self._store.tree.page_size
        return tuple(places(strand.boundaries, len(strand.tokens), strand.prompt_length, deepest))

    def _use(self, plan: Plan, now: float) -> None:
        for page in plan.path:
            page.last_used, page.uses = now, page.uses + 1
        if plan.checkpoint:
            plan.checkpoint.last_used = now

    # ------------------------------------------------------------------------------------------------ growing

    def grew(self, strand: Strand, tokens: Sequence[int], *, keep_state: bool) -> None:
        """The strand's caches hold these tokens more: none, if all but the last one were restored.

        Args:
            keep_state: this is one of the stops.
        """
        start = len(strand.tokens)
        strand.tokens += tokens
        self._layers.grow_little(strand.caches)
        self._note_computed(strand, start, len(strand.tokens))
        self._extend(strand, start)
        if keep_state:
            self._keep_state(strand)
        self.shrink()

    def _extend(self, strand: Strand, start: int) -> None:
        self._ledger.note_pages(self._store.extend(strand))
        for end in strand.boundaries:
            if start < end <= len(strand.tokens):
                full = end // self._store.tree.page_size
                page = strand.path[full - 1] if full else strand.root
                self._ledger.note_boundary(page, strand.tokens[page.end : end])

    def _keep_state(self, strand: Strand) -> None:
        checkpoint = self._store.keep_state(strand)
        while checkpoint and (poor := self._superseded(checkpoint)):
            self._store.drop_checkpoint(poor)

    def _superseded(self, checkpoint: Checkpoint) -> Checkpoint | None:
        return superseded(
            checkpoint,
            self._store.token_bytes,
            is_short=self._store.checkpoint_weight.nbytes > self._evictor.limits.checkpoint_bytes / 2,
        )

    # ------------------------------------------------------------------------------------------------ the end

    def close(self, strand: Strand, caches: list[Any], tokens: Sequence[int]) -> None:
        """The row is gone. `caches` hold exactly `tokens`; they are this strand's, or came out of a batch."""
        with self._store.nothing_by_halves(strand):
            start = len(strand.tokens)
            strand.last_used = self._clock()
            strand.take_back(caches)
            self._layers.settle(caches)
            strand.tokens = list(tokens)
            self._extend(strand, start)
            strand.shared_to = min(strand.shared_to, len(strand.tokens))
            if not strand.tokens or self._has_twin(strand) or not self._store.take_over(strand):
                self._store.dissolve(strand)
            else:
                self._store.rest(strand)
        self.shrink()

    def _has_twin(self, strand: Strand) -> bool:
        return any(one is not strand and one.tokens == strand.tokens for one in strand.end_page.strands)

    def discard(self, strand: Strand) -> None:
        """The row failed, and nobody knows what its caches hold: nothing of them is ever reused."""
        self._store.discard(strand)

    # ------------------------------------------------------------------------------------------------- limits

    def shrink(self, shortage: int = 0) -> None:
        """Back within the limits, and counted.

        Args:
            shortage: bytes to let go of beyond that, as far as there is anything that may go.
        """
        self._shrink(shortage=shortage)
        self._note_kept()

    def _make_room(self, nbytes: int) -> None:
        """For what a row is about to take."""
        self._shrink(coming=nbytes)

    def _shrink(self, coming: int = 0, shortage: int = 0) -> None:
        if self._evictor.shrink(self._clock(), coming, shortage):
            self._layers.release()

    def tidy(self, budget_s: float) -> None:
        """Cut runs back to their pages, and into short pieces: one leaf, and more while there is time.

        What this gives back counts until then. For every step, so that none has to do all of it.
        """
        if self._store.tree.untidy:
            end = time.perf_counter() + budget_s
            self._store.tidy(lambda: time.perf_counter() >= end)
            self._note_kept()

    @property
    def beside_bytes(self) -> int:
        """What running rows hold outside of their strands: a batch."""
        return self._evictor.beside_bytes

    @beside_bytes.setter
    def beside_bytes(self, nbytes: int) -> None:
        self._evictor.beside_bytes = nbytes

    @property
    def room_bytes(self) -> int:
        """For all that is kept, and for what running rows hold."""
        return self._evictor.limits.budget_bytes

    def check_integrity(self) -> None:
        """Raises `BrokenInvariant` if anything contradicts anything."""
        self._store.check_integrity()

    # ------------------------------------------------------------------------------------------------- counts

    def _note_lookup(self, plan: Plan, restored: Restored) -> None:
        metrics = self._metrics
        metrics.lookups += 1
        metrics.hits += 1 if plan.length else 0
        metrics.reused_tokens += plan.length
        metrics.handed_over += 1 if plan.hand_over else 0
        metrics.rejected_keys = self._store.tree.rejected_keys
        if restored.miss:
            metrics.misses[restored.miss] += 1

    def _note_computed(self, strand: Strand, start: int, end: int) -> None:
        """Tokens of the prompt. Its last one is computed by the first step of the reply."""
        if end == strand.prompt_length - 1:
            end += 1
        self._metrics.computed_tokens += end - start
        self._metrics.unavoidable_tokens += end - min(max(start, strand.known), end)

    def _note_kept(self) -> None:
        metrics, store = self._metrics, self._store
        metrics.evictions = self._evictor.evicted
        metrics.page_bytes = store.pages_weight.nbytes
        metrics.strand_bytes = store.resting_weight.nbytes
        metrics.checkpoint_bytes = store.checkpoint_weight.nbytes
        live = store.live_weight
        metrics.live_bytes = live.nbytes + self.beside_bytes
        metrics.arrays = (store.weight + live).arrays
        metrics.pages = store.tree.count
        metrics.checkpoints = len(store.checkpoints)
        metrics.strands = len(store.strands)


def _ends(ids: tuple[int, ...], boundaries: Sequence[int]) -> tuple[int, ...]:
    """Ends of messages, at least one token short of all."""
    return tuple(min(end, len(ids) - 1) for end in boundaries)


def _miss(plan: Plan, *, known: int, kept: int, once: int) -> Miss | None:
    """Why no more is restored.

    Args:
        known: tokens that stand for what was computed, in these words or in others.
        kept, once: how many of these very tokens are kept, and were ever computed.
    """
    if once > plan.length:
        return "no_state" if kept >= once else "evicted"
    if known > plan.length:
        return "drift"
    return None if plan.length else "new"
