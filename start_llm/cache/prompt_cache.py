"""The prompt cache: store computed prompts, and restore the longest cached prefix of a new one.

    open            restore a prompt's longest cached prefix into caches that the sequence continues from
    record_chunk    a chunk was computed: its KV can be copied into other sequences from now on
    close           the sequence has left the engine: keep its caches idle, or turn them into a run of pages
    shrink          evict until the limits hold

A *page* is a node of the prefix tree: a block of tokens, whose KV may have been evicted since. A sequence's
caches stay contiguous while it runs (*active*) and as long as a later request may continue them in place
(*idle*). After that they are split: a *run* is one set of arrays with the KV of consecutive pages. A
*checkpoint* is a copy of a state that cannot be trimmed to fewer tokens, such as a recurrent layer's.

Owned by the engine thread.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from start_llm.cache.checkpoints import (
    MAX_OF_A_CONVERSATION,
    checkpoint_to_drop,
    choose_positions,
    choose_positions_in_text,
    max_of_a_text,
    step_in_text,
)
from start_llm.cache.computed_prefixes import ComputedPrefixIndex
from start_llm.cache.disk.disk_reads import DiskWait
from start_llm.cache.disk.disk_restore import DiskRestore, DiskRestorer
from start_llm.cache.disk.disk_tier import DiskAccess
from start_llm.cache.disk.write_back import WriteBack
from start_llm.cache.eviction import EvictionLimits, Evictor
from start_llm.cache.layers import Layers
from start_llm.cache.page_store import PageStore
from start_llm.cache.pages import Checkpoint, Page, SequenceCache
from start_llm.cache.plan import RestorePlan, in_front_of_image, kept_length, plan_restore
from start_llm.cache.restore import Restorer
from start_llm.core.events import Miss, Restored
from start_llm.core.thread_owners import ENGINE, owned_by
from start_llm.telemetry.metrics import CacheMetrics


@dataclass(frozen=True, slots=True)
class OpenedSequence:
    """The caches for a prompt.

    Attributes:
        seq_cache: active; the KV of its `tokens` is restored, the rest has to be computed.
        checkpoint_positions: positions at which prefill has to stop, so that state can be kept there.
        restored: how much was restored, and why no more, as an event.
    """

    seq_cache: SequenceCache
    checkpoint_positions: tuple[int, ...]
    restored: Restored


class _Match(NamedTuple):
    """The match of a prompt in the cache.

    Attributes:
        root: of the tree under the prompt's salt.
        ends: of its messages, at least one token before its own.
        matched: the longest path of full pages with the prompt's tokens, with or without KV.
        ever_computed: tokens at its beginning that were computed once as these very tokens.
    """

    root: Page
    ends: tuple[int, ...]
    matched: list[Page]
    ever_computed: int
    plan: RestorePlan
    restored: Restored


@owned_by(ENGINE)
class PromptCache:
    """The KV and state of one network that outlive their requests.

    Args:
        identity: fingerprint of the weights and of all else that KV depends on; see `models.identity`.
        page_size: tokens of a full page.
        clock: returns seconds.

    Attributes:
        identity: also changes with the format in which KV is kept.
        supports_reuse: computed tokens can be restored (False in `NoReuse`).
    """

    supports_reuse = True

    def __init__(
        self,
        layers: Layers,
        *,
        limits: EvictionLimits,
        page_size: int,
        metrics: CacheMetrics,
        identity: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.identity = identity + layers.kv_format_tag.encode()
        self._layers = layers
        self._store = PageStore(layers, page_size)
        self._evictor = Evictor(self._store, limits)
        self._restorer = Restorer(layers, self._store, self._evictor, self._make_room)
        self._computed_prefixes = ComputedPrefixIndex(page_size)
        self._metrics = metrics
        self._clock = clock
        self._disk_restorer: DiskRestorer | None = None
        self._write_back: WriteBack | None = None

    def attach_disk(self, disk: DiskAccess) -> None:
        """Use a disk tier from now on."""
        self._disk_restorer = DiskRestorer(
            disk, self._layers, self._restorer, keep=self._keep_restored, drop=self._keep_pages
        )
        self._write_back = WriteBack(
            disk, self._layers, self._store, is_tight=self._evictor.is_tight, clock=self._clock
        )
        self._evictor.write_back = self._write_back

    # --------------------------------------------------------------------------------------------------- open

    def open(
        self,
        ids: tuple[int, ...],
        salt: bytes,
        boundaries: Sequence[int],
        repeated_tokens: int = 0,
        capacity: int = 0,
        *,
        most: int | None = None,
    ) -> OpenedSequence:
        """Restore the longest cached prefix of `ids`, and leave at least one token to compute.

        Args:
            salt: what is stored under one salt is never found under another.
            boundaries: ends of the messages, ascending, in tokens.
            repeated_tokens: prompt tokens of messages that were computed before, though perhaps rendered as
                other tokens. Only for telling why a prompt was not restored.
            capacity: tokens that the caches should take without growing: the prompt and part of the reply.
            most: tokens to restore at most; None: as many as there are.
        """
        found = self._find(ids, salt, boundaries, repeated_tokens, most)
        opened = self._open(found, ids, len(ids), capacity)
        self._note_lookup(found.plan, opened.restored)
        return opened

    def reopen(
        self,
        ids: tuple[int, ...],
        salt: bytes,
        boundaries: Sequence[int],
        before: SequenceCache,
        capacity: int = 0,
        *,
        most: int | None = None,
    ) -> OpenedSequence:
        """Restore a preempted sequence, with any reply tokens after its prompt. Counts no lookup.

        Args:
            before: its caches when it was preempted.
        """
        has_begun = len(ids) > before.prompt_length
        repeated_tokens = len(ids) if has_begun else before.repeated_tokens
        found = self._find(ids, salt, boundaries, repeated_tokens, most)
        return self._open(found, ids, before.prompt_length, capacity)

    def restorable(self, ids: tuple[int, ...], salt: bytes) -> int:
        """Return how many tokens of `ids` memory can restore now."""
        root = self._root(salt)
        matched = self._store.tree.match(root, ids[:-1])
        return plan_restore(root, matched, ids, has_state=self._layers.has_state).length

    def _open(self, found: _Match, ids: tuple[int, ...], prompt_length: int, capacity: int) -> OpenedSequence:
        now, plan = self._clock(), found.plan
        self._use(plan, now)
        self._metrics.cut_images += plan.is_cut
        seq_cache = self._restorer.restore(plan, found.root, ids, capacity)
        seq_cache.last_used = now
        seq_cache.boundaries = found.ends
        prompt_end = seq_cache.boundaries[-1] if seq_cache.boundaries else prompt_length - 1
        seq_cache.shared_prefix_length = max(seq_cache.shared_prefix_length, prompt_end)
        seq_cache.prompt_length = prompt_length
        seq_cache.repeated_tokens = max(found.ever_computed, found.restored.repeated_tokens)
        return OpenedSequence(seq_cache, self._checkpoint_positions(seq_cache, ids, found), found.restored)

    def peek(
        self, ids: tuple[int, ...], salt: bytes, boundaries: Sequence[int], repeated_tokens: int = 0
    ) -> Restored:
        """Return what `open` would restore, without changing or counting anything."""
        rejected = self._store.tree.rejected_keys
        found = self._find(ids, salt, boundaries, repeated_tokens)
        self._store.tree.rejected_keys = rejected
        if self._disk_restorer is None:
            return found.restored
        length = self._disk_restorer.length(found.root, found.matched, ids, found.plan.length)
        return found.restored if length == found.plan.length else _with_disk(found.restored, length)

    def _find(
        self,
        ids: tuple[int, ...],
        salt: bytes,
        boundaries: Sequence[int],
        repeated_tokens: int,
        most: int | None = None,
    ) -> _Match:
        """Match a prompt in memory. Four lengths of its beginning, in tokens, decide what to say about it:

        plan.length         can be restored now
        kept                has KV in the cache, though perhaps no state to continue from
        ever_computed       was computed once as these very tokens, and perhaps evicted since
        repeated_tokens     belongs to messages that were computed once, perhaps rendered as other tokens
        """
        rejected, root = self._store.tree.rejected_keys, self._root(salt)
        matched = self._store.tree.match(root, ids[:-1])
        plan = plan_restore(root, matched, ids, has_state=self._layers.has_state)
        if most is not None and most < plan.length:
            within = [page for page in matched if page.end <= most]
            plan = plan_restore(root, within, ids[: most + 1], has_state=self._layers.has_state)
        kept = plan.length if plan.is_cut else kept_length(root, matched, ids)
        known = self._computed_prefixes.known(matched[-1] if matched else root, ids[:-1])
        ever_computed = max(known, kept, plan.length)
        told = max(self._last_end(ids, boundaries, ever_computed), plan.length)
        repeated_tokens = max(told, min(repeated_tokens, len(ids) - 1))
        restored = Restored(
            plan.length,
            _miss(plan, repeated_tokens=repeated_tokens, kept=kept, ever_computed=told),
            rejected_keys=self._store.tree.rejected_keys - rejected,
            kept=max(kept, plan.length),
            repeated_tokens=repeated_tokens,
            image_was_cut=plan.is_cut,
        )
        return _Match(root, _ends(ids, boundaries), matched, ever_computed, plan, restored)

    def _last_end(self, ids: tuple[int, ...], boundaries: Sequence[int], length: int) -> int:
        """Return the last end of a page or of a message within `length`; `length` if there are no messages.

        The few tokens after it, which open a reply, are no news: nobody is told that they are computed again.
        """
        if not boundaries:
            return length
        page_end = length - length % self._store.tree.page_size
        return max(page_end, *(end for end in _ends(ids, boundaries) if end <= length), 0)

    def _root(self, salt: bytes) -> Page:
        """Return the root for a salt. Two digests of equal length keep identity and salt apart."""
        parts = (hashlib.blake2b(part, digest_size=16).digest() for part in (self.identity, salt))
        return self._store.tree.root(b"".join(parts))

    def _checkpoint_positions(
        self, seq_cache: SequenceCache, ids: tuple[int, ...], found: _Match
    ) -> tuple[int, ...]:
        """Choose where to keep state; inside an image it could not be used."""
        if not self._layers.has_state:
            return ()
        depth = len(found.matched)
        if self._disk_restorer:
            depth = self._disk_restorer.depth(seq_cache.root, found.matched, ids)
        done, total, deepest = (
            len(seq_cache.tokens),
            seq_cache.prompt_length,
            depth * self._store.tree.page_size,
        )
        known = max(found.ever_computed, deepest)
        if seq_cache.boundaries:
            repeated = found.restored.repeated_tokens
            chosen = choose_positions(seq_cache.boundaries, done, total, deepest, repeated, known)
        else:
            step = step_in_text(self._layers.window)
            chosen = choose_positions_in_text(done, total, known, self._max_of_a_text(), step)
        positions = {in_front_of_image(ids, position) for position in chosen}
        return tuple(sorted(position for position in positions if position > done))

    def _max_of_a_text(self) -> int:
        return max_of_a_text(self._store.mean_state_bytes, self._evictor.limits.checkpoint_bytes)

    def _use(self, plan: RestorePlan, now: float) -> None:
        for page in plan.path:
            page.last_used, page.uses = now, page.uses + 1
        if plan.checkpoint:
            plan.checkpoint.last_used = now
        if self._write_back:
            self._write_back.touch(plan.path)

    # --------------------------------------------------------------------------------------------------- disk

    def wait_for_disk(
        self, ids: tuple[int, ...], salt: bytes, capacity: int, *, speed: float, may_look: bool = True
    ) -> DiskWait | DiskRestore | None:
        """Begin to restore from the disk what memory does not have of a prompt.

        Returns something that is over when the prompt can be opened, or asked for again; None if it can be
        opened now.

        Args:
            capacity: tokens that the caches should take without growing.
            speed: tokens that are computed in a second; nothing is restored that is computed faster.
            may_look: headers of files may be read first.
        """
        if self._disk_restorer is None:
            return None
        root = self._root(salt)
        matched = self._store.tree.match(root, ids[:-1])
        kept = plan_restore(root, matched, ids, has_state=self._layers.has_state).length
        wait = self._disk_restorer.begin(
            root, matched, ids, kept=kept, room=capacity, may_look=may_look, speed=speed
        )
        self._metrics.cut_images += isinstance(wait, DiskRestore) and wait.plan.is_cut
        return wait

    def leave_disk(self, wait: DiskWait | DiskRestore) -> None:
        """Note that a prompt goes on without what it waited for. What comes of it later is kept."""
        if self._disk_restorer:
            self._disk_restorer.leave(wait)

    def collect_from_disk(self) -> None:
        """Complete the restores from the disk whose files have been read."""
        if self._disk_restorer:
            self._disk_restorer.collect()

    def _keep_restored(self, seq_cache: SequenceCache, tokens: list[int]) -> None:
        """Keep caches that hold these tokens, which the disk had, for the prompt that waits for them."""
        with self._store.rollback_on_error(seq_cache):
            self._hold(seq_cache, tokens)
            seq_cache.shared_prefix_length = 0
            self._keep(seq_cache)

    def _keep_pages(self, seq_cache: SequenceCache, tokens: list[int]) -> None:
        """Keep the pages of caches that lack the state at their end."""
        with self._store.rollback_on_error(seq_cache):
            self._hold(seq_cache, tokens)
        self._store.release_pages(seq_cache)

    def _hold(self, seq_cache: SequenceCache, tokens: list[int]) -> None:
        seq_cache.last_used = self._clock()
        seq_cache.tokens = tokens
        self._extend(seq_cache)

    def write_to_disk(self, *, is_busy: bool) -> None:
        """Hand pages and states that are due to the disk thread. Called in every step.

        Args:
            is_busy: requests are running; then little of the time is spent on this.
        """
        if self._write_back:
            self._write_back.offer(is_busy=is_busy)

    def flush_to_disk(self, patience_s: float) -> None:
        """Write everything that is not on the disk yet, for at most `patience_s` seconds."""
        if self._write_back:
            self._write_back.flush(patience_s)

    def seconds_until_disk(self) -> float | None:
        """Return the seconds after which `write_to_disk` should be called even if nothing else happens."""
        return self._write_back.seconds_until_due() if self._write_back else None

    # ------------------------------------------------------------------------------------------------- growth

    def record_chunk(self, seq_cache: SequenceCache, tokens: Sequence[int], *, keep_state: bool) -> None:
        """Record that the sequence's caches now hold these tokens too.

        `tokens` is empty if all of the prompt but its last token was restored.

        Args:
            keep_state: the caches end at one of the checkpoint positions.
        """
        start = len(seq_cache.tokens)
        seq_cache.tokens += tokens
        self._layers.grow_in_small_steps(seq_cache.caches)
        self._note_computed(seq_cache, start, len(seq_cache.tokens))
        self._extend(seq_cache)
        if keep_state:
            self._keep_state(seq_cache)
        self.shrink()

    def _extend(self, seq_cache: SequenceCache) -> None:
        """Add the pages that the tokens have filled, and remember that all of the tokens were computed."""
        self._computed_prefixes.note_pages(self._store.extend(seq_cache))
        page = seq_cache.end_page
        self._computed_prefixes.note_tail(page, seq_cache.tokens[page.end :])

    def _keep_state(self, seq_cache: SequenceCache) -> None:
        reach = 0 if seq_cache.boundaries else step_in_text(self._layers.window)
        checkpoint = self._store.keep_state(seq_cache, reach)
        while checkpoint and (victim := self._next_to_drop(checkpoint, seq_cache.boundaries)):
            self._store.drop_checkpoint(victim)

    def _next_to_drop(self, checkpoint: Checkpoint, boundaries: tuple[int, ...]) -> Checkpoint | None:
        return checkpoint_to_drop(
            checkpoint,
            self._store.token_bytes,
            boundaries,
            is_tight=self._store.checkpoint_usage.nbytes > self._evictor.limits.checkpoint_bytes / 2,
            most=MAX_OF_A_CONVERSATION if boundaries else self._max_of_a_text(),
        )

    # -------------------------------------------------------------------------------------------------- close

    def close(
        self,
        seq_cache: SequenceCache,
        caches: list[Any],
        tokens: Sequence[int],
        *,
        is_given_up: bool = False,
    ) -> None:
        """Keep what a sequence computed when it leaves the engine. `caches` hold exactly `tokens`.

        They are those that `open` restored, or were taken out of a batch.

        Args:
            is_given_up: its client went away before the reply was complete.
        """
        with self._store.rollback_on_error(seq_cache):
            seq_cache.last_used = self._clock()
            seq_cache.set_caches(caches)
            self._layers.materialize(caches)
            seq_cache.tokens = list(tokens)
            self._extend(seq_cache)
            seq_cache.shared_prefix_length = min(seq_cache.shared_prefix_length, len(seq_cache.tokens))
            seq_cache.is_given_up = is_given_up
            if is_given_up:
                _note_given_up(seq_cache)
            self._keep(seq_cache)
        self.shrink()
        if self._write_back:
            self._write_back.note_change()

    def _keep(self, seq_cache: SequenceCache) -> None:
        """Keep a sequence cache for the next turn, or as pages if another one is as good."""
        is_worth_keeping = bool(seq_cache.tokens) and not self._has_twin(seq_cache)
        if is_worth_keeping and self._store.adopt_pages(seq_cache):
            self._store.make_idle(seq_cache)
        else:
            self._store.split_into_pages(seq_cache)

    def _has_twin(self, seq_cache: SequenceCache) -> bool:
        return any(
            one is not seq_cache and one.tokens == seq_cache.tokens for one in seq_cache.end_page.seq_caches
        )

    def discard(self, seq_cache: SequenceCache) -> None:
        """Drop the caches of a failed sequence: their content is unknown, so none of it is reused."""
        self._store.discard(seq_cache)

    # ------------------------------------------------------------------------------------------------- limits

    def shrink(self, shortage: int = 0) -> None:
        """Evict until the limits hold, and update the metrics.

        Args:
            shortage: bytes to free beyond that, as far as anything may be evicted.
        """
        self._shrink(shortage=shortage)
        self._note_kept()

    def resize(self, budget_bytes: int) -> None:
        """Change the budget, and evict what is beyond it."""
        self._evictor.limits = replace(self._evictor.limits, budget_bytes=budget_bytes)
        self._metrics.budget_bytes = budget_bytes
        self.shrink()

    def _make_room(self, nbytes: int) -> None:
        """Evict until a sequence can take `nbytes`."""
        self._shrink(incoming=nbytes)

    def _shrink(self, incoming: int = 0, shortage: int = 0) -> None:
        if self._evictor.shrink(self._clock(), incoming, shortage):
            self._layers.release()

    def tidy(self, budget_s: float) -> None:
        """Trim the arrays of runs to their pages, a piece at a time: one array at least, and more while there
        is time.

        Until then, what they have beyond their pages counts against the budget. Called in every step, so that
        no step has to do all of it.
        """
        if self._store.tree.untrimmed_runs:
            end = time.perf_counter() + budget_s
            self._store.tidy(lambda: time.perf_counter() >= end)
            self._note_kept()

    @property
    def batched_bytes(self) -> int:
        """Bytes that running sequences hold outside of their sequence caches, in a batch."""
        return self._evictor.batched_bytes

    @batched_bytes.setter
    def batched_bytes(self, nbytes: int) -> None:
        self._evictor.batched_bytes = nbytes

    @property
    def budget_bytes(self) -> int:
        """The budget in bytes for everything that is kept and for the caches of running sequences."""
        return self._evictor.limits.budget_bytes

    def check_integrity(self) -> None:
        """Check everything.

        Raises:
            BrokenInvariant: the cache contradicts itself.
        """
        self._store.check_integrity()

    # ------------------------------------------------------------------------------------------------- counts

    def _note_lookup(self, plan: RestorePlan, restored: Restored) -> None:
        metrics = self._metrics
        metrics.lookups += 1
        metrics.hits += 1 if plan.length else 0
        metrics.reused_tokens += plan.length
        metrics.reused_in_place += 1 if plan.reused_in_place else 0
        metrics.rejected_keys = self._store.tree.rejected_keys
        if restored.miss:
            metrics.misses[restored.miss] += 1

    def _note_computed(self, seq_cache: SequenceCache, start: int, end: int) -> None:
        """Count computed prompt tokens, with the last one, which the first decode step computes."""
        if end == seq_cache.prompt_length - 1:
            end += 1
        self._metrics.computed_tokens += end - start
        self._metrics.unavoidable_tokens += end - min(max(start, seq_cache.repeated_tokens), end)

    def _note_kept(self) -> None:
        metrics, store = self._metrics, self._store
        metrics.evictions = self._evictor.evicted
        metrics.page_bytes = store.pages_usage.nbytes
        metrics.seq_cache_bytes = store.idle_usage.nbytes
        metrics.checkpoint_bytes = store.checkpoint_usage.nbytes
        active = store.active_usage
        metrics.live_bytes = active.nbytes + self.batched_bytes
        metrics.arrays = (store.usage + active).arrays
        metrics.pages = store.tree.count
        metrics.checkpoints = len(store.checkpoints)
        metrics.seq_caches = len(store.seq_caches)


def _note_given_up(seq_cache: SequenceCache) -> None:
    """Record that nobody else has used the pages that this sequence computed."""
    for page in seq_cache.path:
        page.uses = 0 if page.uses == 1 else page.uses


def _with_disk(restored: Restored, length: int) -> Restored:
    """Return what is restored if the disk gives `length` tokens."""
    kept, repeated = max(restored.kept, length), max(restored.repeated_tokens, length)
    return replace(restored, tokens=length, miss=None, kept=kept, repeated_tokens=repeated)


def _ends(ids: tuple[int, ...], boundaries: Sequence[int]) -> tuple[int, ...]:
    """Return the ends of the messages, at least one token before the end of the prompt."""
    return tuple(min(end, len(ids) - 1) for end in boundaries)


def _miss(plan: RestorePlan, *, repeated_tokens: int, kept: int, ever_computed: int) -> Miss | None:
    """Return why no more was restored; None if all that was computed before was restored, "new" if nothing
    was.

    Args:
        repeated_tokens: prompt tokens of messages that were computed before, as these tokens or as others.
        kept, ever_computed: how many of these very tokens are stored, and were ever computed.
    """
    if ever_computed > plan.length:
        return "no_state" if kept >= ever_computed else "evicted"
    if repeated_tokens > plan.length:
        return "drift"
    return None if plan.length else "new"
