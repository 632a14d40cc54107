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

import itertools
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from start_llm.cache.checkpoints import CheckpointKeeper
from start_llm.cache.disk.disk_restore import DiskRestorer
from start_llm.cache.disk.disk_tier import DiskAccess
from start_llm.cache.disk.followed_restores import FollowedRestores
from start_llm.cache.disk.prompt_disk import PromptDisk
from start_llm.cache.disk.write_back import WriteBack
from start_llm.cache.eviction import EvictionLimits, Evictor
from start_llm.cache.layers import Layers
from start_llm.cache.page_store import PageStore
from start_llm.cache.pages import KeptUntil, SequenceCache
from start_llm.cache.plan import RestorePlan, in_front_of_image, without_cutting
from start_llm.cache.prompt_lookup import PromptLookup, PromptMatch, message_ends
from start_llm.cache.restore import Restorer
from start_llm.core.common_beginning import common_length
from start_llm.core.events import Restored
from start_llm.core.prompt import KeptPrefix
from start_llm.core.thread_owners import ENGINE, owned_by
from start_llm.telemetry.metrics import CacheMetrics

_OFF = Restored(0, "off")


@dataclass(frozen=True, slots=True)
class OpenedSequence:
    """The caches for a prompt.

    Attributes:
        seq_cache: active; the KV of its `tokens` is restored, the rest has to be computed.
        checkpoint_positions: where state is kept. Prefill has to stop there, unless the cache
            `passes_checkpoints`.
        restored: how much was restored, and why no more, as an event.
        is_in_place: it was restored without a copy.
    """

    seq_cache: SequenceCache
    checkpoint_positions: tuple[int, ...]
    restored: Restored
    is_in_place: bool = False


@owned_by(ENGINE)
class PromptCache:
    """The KV and state of one network that outlive their requests.

    Args:
        limits: None: nothing outlives its request, and every prompt is computed in full. It is the same if
            the layers have a class that cannot be stored.
        page_size: tokens of a full page.
        identity: fingerprint of the weights and of all else that KV depends on; see `models.identity`.
        clock: returns seconds.

    Attributes:
        supports_reuse: computed tokens can be restored.
        disk: restores from the disk, and writes to it.
    """

    def __init__(
        self,
        layers: Layers,
        *,
        limits: EvictionLimits | None = None,
        page_size: int = 256,
        metrics: CacheMetrics | None = None,
        identity: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.supports_reuse = limits is not None and not layers.unknown
        self._layers = layers
        self._metrics = metrics or CacheMetrics()
        self._clock = clock
        self._store = PageStore(layers, page_size)
        self._lookup = PromptLookup(self._store, identity + layers.kv_format_tag.encode())
        self._evictor = Evictor(self._store, limits or EvictionLimits(budget_bytes=0), clock)
        self._checkpoints = CheckpointKeeper(self._store, self._evictor)
        self._restorer = Restorer(self._store, self._evictor)
        self.disk = PromptDisk(self._lookup, self._metrics)
        self._shrinks_later = False

    @property
    def passes_checkpoints(self) -> bool:
        """Whether a chunk may go on behind a checkpoint position, since states can be taken back to it."""
        return self.supports_reuse and self._layers.window > 0

    def attach_disk(self, disk: DiskAccess) -> None:
        """Use a disk tier from now on."""
        self.disk.restorer = DiskRestorer(
            disk,
            self._layers,
            self._restorer,
            clock=self._clock,
            keep=self._keep_restored,
            keep_pages=self._keep_pages,
        )
        self.disk.followed = FollowedRestores(self._lookup, self.disk.restorer, self._store, disk.tier)
        self.disk.write_back = self._evictor.write_back = WriteBack(
            disk, self._layers, self._store, is_tight=self._evictor.is_tight, clock=self._clock
        )

    # --------------------------------------------------------------------------------------------------- open

    def open(
        self,
        ids: tuple[int, ...],
        salt: bytes,
        boundaries: Sequence[int],
        repeated_tokens: int = 0,
        room: int = 0,
        *,
        most: int | None = None,
    ) -> OpenedSequence:
        """Restore the longest cached prefix of `ids`, and leave at least one token to compute.

        Args:
            salt: what is stored under one salt is never found under another.
            boundaries: ends of the messages, ascending, in tokens.
            repeated_tokens: prompt tokens of messages that were computed before, though perhaps rendered as
                other tokens. Only for telling why a prompt was not restored.
            room: tokens that the caches should take without growing: the prompt and part of the reply.
            most: tokens to restore at most; None: as many as there are.
        """
        match = self._lookup.match(ids, salt, most)
        opened = self._open(match, boundaries, repeated_tokens, len(ids), room)
        self._note_lookup(opened)
        return opened

    def open_for_idle_work(
        self, ids: tuple[int, ...], salt: bytes, boundaries: Sequence[int], *, most: int | None = None
    ) -> OpenedSequence:
        """Restore a prompt for which nobody waits; see `open`. Nothing counts as used or looked up, and no
        sequence cache loses a token.
        """
        match = self._lookup.match(ids, salt, most)
        match = replace(match, plan=without_cutting(match.plan))
        return self._open(match, boundaries, 0, len(ids), len(ids), is_idle_work=True)

    def reopen(
        self,
        ids: tuple[int, ...],
        salt: bytes,
        boundaries: Sequence[int],
        before: SequenceCache,
        room: int = 0,
        *,
        most: int | None = None,
    ) -> OpenedSequence:
        """Restore a preempted sequence, with any reply tokens after its prompt. Counts no lookup.

        Args:
            before: its sequence cache when it was preempted. Others may have taken its caches since.
        """
        before.is_paused = False
        has_begun = len(ids) > before.prompt_length
        repeated_tokens = len(ids) if has_begun else before.repeated_tokens
        match = self._lookup.match(ids, salt, most)
        opened = self._open(match, boundaries, repeated_tokens, before.prompt_length, room)
        return self._with_kept(opened, ids, before.kept)

    def with_kept(
        self, opened: OpenedSequence, ids: tuple[int, ...], kept: Sequence[KeptPrefix]
    ) -> OpenedSequence:
        """Return an opened sequence whose beginnings stay at least so long, as far as the budget allows.

        Args:
            ids: its prompt.
        """
        now = self._clock()
        return self._with_kept(opened, ids, [KeptUntil(place.tokens, now + place.seconds) for place in kept])

    def _with_kept(
        self, opened: OpenedSequence, ids: tuple[int, ...], kept: Sequence[KeptUntil]
    ) -> OpenedSequence:
        seq_cache = opened.seq_cache
        seq_cache.kept = tuple(kept)
        seq_cache.note_kept()
        if not (kept and self.supports_reuse and self._layers.has_state):
            return opened
        ends = {
            in_front_of_image(ids, place.tokens) for place in kept if place.tokens < seq_cache.prompt_length
        }
        more = {end for end in ends if end > len(seq_cache.tokens)}
        positions = tuple(sorted({*opened.checkpoint_positions, *more}))
        return replace(opened, checkpoint_positions=positions)

    def restorable(self, ids: tuple[int, ...], salt: bytes) -> int:
        """Return how many tokens of `ids` memory can restore now."""
        match = self._lookup.match(ids, salt)
        self._store.tree.rejected_keys -= match.rejected_keys
        return match.plan.length

    def shared_with(self, ids: Sequence[int], other: Sequence[int], positions: Sequence[int]) -> int:
        """Return how many tokens of `ids` could be restored from another prompt once that has been computed.

        Args:
            positions: at which a checkpoint of the other one will be kept, ascending.
        """
        if not self.supports_reuse:
            return 0
        common = common_length(tuple(ids), tuple(other))
        if self._layers.has_state and not self._layers.window:
            return max((position for position in positions if position <= common), default=0)
        return common

    def _open(
        self,
        match: PromptMatch,
        boundaries: Sequence[int],
        repeated_tokens: int,
        prompt_length: int,
        room: int,
        *,
        is_idle_work: bool = False,
    ) -> OpenedSequence:
        if not self.supports_reuse:
            seq_cache = SequenceCache(self._layers.fresh(room), match.root)
            seq_cache.prompt_length = prompt_length
            return OpenedSequence(seq_cache, (), _OFF)
        now, ids, plan = self._clock(), match.ids, match.plan
        restored, ever_computed = self._lookup.explain(match, boundaries, repeated_tokens)
        if is_idle_work:
            now = _last_use(plan)
        else:
            self._use(plan, now)
        self._metrics.cut_images += plan.is_cut
        seq_cache = self._restorer.restore(plan, match.root, ids, room)
        seq_cache.last_used, seq_cache.is_idle_work = now, is_idle_work
        seq_cache.boundaries = message_ends(ids, boundaries)
        prompt_end = seq_cache.boundaries[-1] if seq_cache.boundaries else prompt_length - 1
        seq_cache.shared_prefix_length = max(seq_cache.shared_prefix_length, prompt_end)
        seq_cache.prompt_length = prompt_length
        seq_cache.repeated_tokens = max(ever_computed, restored.repeated_tokens)
        positions: tuple[int, ...] = ()
        if self._layers.has_state:
            pages = self.disk.restorer.depth(match) if self.disk.restorer else len(match.matched)
            repeated_tokens = restored.repeated_tokens
            positions = self._checkpoints.positions(seq_cache, ids, pages, ever_computed, repeated_tokens)
        return OpenedSequence(seq_cache, positions, restored, plan.reused_in_place is not None)

    def peek(
        self, ids: tuple[int, ...], salt: bytes, boundaries: Sequence[int], repeated_tokens: int = 0
    ) -> Restored:
        """Return what `open` would restore, without changing or counting anything."""
        if not self.supports_reuse:
            return _OFF
        match = self._lookup.match(ids, salt)
        self._store.tree.rejected_keys -= match.rejected_keys
        restored, _ = self._lookup.explain(match, boundaries, repeated_tokens)
        if self.disk.restorer is None:
            return restored
        length, pages = self.disk.restorer.length(match), self.disk.restorer.depth(match)
        restored = replace(restored, stored=max(restored.stored, pages * self._store.tree.page_size))
        return restored if length == match.plan.length else _with_disk(restored, length)

    def _use(self, plan: RestorePlan, now: float) -> None:
        for page in plan.path:
            page.last_used, page.uses = now, page.uses + 1
        if plan.checkpoint:
            plan.checkpoint.last_used = now
        if self.disk.write_back:
            self.disk.write_back.touch(plan.path)

    def _keep_restored(self, seq_cache: SequenceCache, tokens: list[int]) -> None:
        """Keep caches that hold these tokens, which the disk had, for the prompt that waits for them."""
        with self._store.rollback_on_error(seq_cache):
            self._hold(seq_cache, tokens)
            seq_cache.is_unopened = True
            self._keep(seq_cache)

    def _keep_pages(self, seq_cache: SequenceCache, tokens: list[int]) -> None:
        """Keep the pages of caches that lack the state at their end."""
        with self._store.rollback_on_error(seq_cache):
            self._hold(seq_cache, tokens)
        self._store.release_pages(seq_cache)

    def _hold(self, seq_cache: SequenceCache, tokens: list[int]) -> None:
        self._note_use(seq_cache)
        seq_cache.tokens = tokens
        self._extend(seq_cache)

    def _note_use(self, seq_cache: SequenceCache) -> None:
        if seq_cache.is_idle_work:
            self._evictor.read_ahead_at = self._clock()
        else:
            seq_cache.last_used = self._clock()

    # ------------------------------------------------------------------------------------------------- growth

    def record_chunk(
        self,
        seq_cache: SequenceCache,
        tokens: Sequence[int],
        *,
        keep_state: bool,
        ahead: int = 0,
        decodes: bool = True,
    ) -> None:
        """Record that the sequence's caches now hold these tokens too.

        `tokens` is empty if all of the prompt but its last token was restored.

        Args:
            keep_state: the tokens end at one of the checkpoint positions.
            ahead: tokens of the same chunk that the caches hold beyond, and that are recorded next. Only if
                `passes_checkpoints`.
            decodes: the prompt's last token is computed too, by the first decode step.
        """
        start = len(seq_cache.tokens)
        seq_cache.tokens += tokens
        self._layers.grow_in_small_steps(seq_cache.caches)
        self._note_computed(seq_cache, start, len(seq_cache.tokens), decodes=decodes)
        if not self.supports_reuse:
            return
        self._extend(seq_cache)
        if keep_state:
            self._checkpoints.keep(seq_cache, self._clock(), ahead)
        seq_cache.note_kept()
        self.shrink()

    def _extend(self, seq_cache: SequenceCache) -> None:
        """Add the pages that the tokens have filled, and remember that all of the tokens were computed."""
        computed = self._lookup.computed_prefixes
        computed.note_pages(self._store.extend(seq_cache))
        page = seq_cache.end_page
        computed.note_tail(page, seq_cache.tokens[page.end :])

    # -------------------------------------------------------------------------------------------------- close

    def close(
        self,
        seq_cache: SequenceCache,
        caches: list[Any],
        tokens: Sequence[int],
        *,
        is_given_up: bool = False,
        is_paused: bool = False,
    ) -> None:
        """Keep what a sequence computed when it leaves the engine. `caches` hold exactly `tokens`.

        They are those that `open` restored, or were taken out of a batch.

        Args:
            is_given_up: its client went away before the reply was complete.
            is_paused: it was preempted, and goes on later; see `reopen`.
        """
        if not self.supports_reuse:
            self.discard(seq_cache)
            return
        with self._store.rollback_on_error(seq_cache):
            self._note_use(seq_cache)
            seq_cache.set_caches(caches)
            self._layers.materialize(caches)
            seq_cache.tokens = list(tokens)
            self._extend(seq_cache)
            seq_cache.note_kept()
            seq_cache.shared_prefix_length = min(seq_cache.shared_prefix_length, len(seq_cache.tokens))
            # What idle work was restored from is others', who have not given it up.
            seq_cache.is_paused = is_paused
            seq_cache.is_given_up = is_given_up and not seq_cache.is_idle_work
            if seq_cache.is_given_up:
                _note_given_up(seq_cache)
            self._keep(seq_cache)
        self.shrink()
        if self.disk.write_back:
            self.disk.write_back.note_change()

    def _keep(self, seq_cache: SequenceCache) -> None:
        """Keep a sequence cache for the next turn, or as pages if another one is as good."""
        is_worth_keeping = bool(seq_cache.tokens) and not self._is_duplicate(seq_cache)
        if is_worth_keeping and self._store.adopt_pages(seq_cache):
            self._store.make_idle(seq_cache)
        else:
            self._store.split_into_pages(seq_cache)

    def _is_duplicate(self, seq_cache: SequenceCache) -> bool:
        end = seq_cache.end_page
        return any(other is not seq_cache for other in end.seq_caches.equal_to(end.tail_of(seq_cache)))

    def discard(self, seq_cache: SequenceCache) -> None:
        """Drop the caches of a failed sequence: their content is unknown, so none of it is reused."""
        self._store.discard(seq_cache)

    # ------------------------------------------------------------------------------------------------- limits

    def shrink(self, shortage: int = 0) -> None:
        """Evict until the limits hold, and update the metrics.

        Args:
            shortage: bytes to free beyond that, as far as anything may be evicted.
        """
        if self.supports_reuse and not self._shrinks_later:
            self._evictor.shrink(shortage=shortage)
            self._note_sizes()

    @contextmanager
    def shrinking_once(self) -> Generator[None]:
        """Evict at the end of the block, once for all that its sequences have computed or left.

        Each time, the memory of every sequence is counted.
        """
        self._shrinks_later = True
        try:
            yield
        finally:
            self._shrinks_later = False
            self.shrink()

    def resize(self, budget_bytes: int) -> None:
        """Change the budget, and evict what is beyond it."""
        if self.supports_reuse:
            self._evictor.limits = replace(self._evictor.limits, budget_bytes=budget_bytes)
            self._metrics.budget_bytes = budget_bytes
            self.shrink()

    def tidy(self, budget_s: float) -> int:
        """Trim the arrays of runs to their pages, a piece at a time: one array at least, and more while there
        is time. Returns their number.

        Until then, what they have beyond their pages counts against the budget. Called in every step, so that
        no step has to do all of it.
        """
        end = time.perf_counter() + budget_s
        return self._tidy(lambda: time.perf_counter() >= end)

    def trim(self, arrays: int) -> None:
        """Trim so many arrays, in the order of `tidy`."""
        left = itertools.count(arrays - 1, -1)
        self._tidy(lambda: next(left) <= 0)

    def _tidy(self, is_enough: Callable[[], bool]) -> int:
        if not self._store.tree.untrimmed_runs:
            return 0
        trimmed = self._store.tidy(is_enough)
        self._note_sizes()
        return trimmed

    @property
    def batched_bytes(self) -> int:
        """Bytes that running sequences hold outside of their sequence caches, in a batch."""
        return self._evictor.batched_bytes

    @batched_bytes.setter
    def batched_bytes(self, nbytes: int) -> None:
        self._evictor.batched_bytes = nbytes

    @property
    def free_bytes(self) -> int:
        """Bytes that can be taken without evicting anything."""
        return self._evictor.free_bytes if self.supports_reuse else 0

    @property
    def budget_bytes(self) -> int:
        """The budget in bytes for everything that is kept and for the caches of running sequences."""
        return self._evictor.limits.budget_bytes

    # ------------------------------------------------------------------------------------------------- counts

    def _note_lookup(self, opened: OpenedSequence) -> None:
        metrics, restored = self._metrics, opened.restored
        metrics.lookups += 1
        metrics.hits += 1 if restored.tokens else 0
        metrics.reused_tokens += restored.tokens
        metrics.reused_in_place += opened.is_in_place
        metrics.rejected_keys = self._store.tree.rejected_keys
        if restored.miss:
            metrics.misses[restored.miss] += 1

    def _note_computed(self, seq_cache: SequenceCache, start: int, end: int, *, decodes: bool) -> None:
        """Count computed prompt tokens, with the last one if a decode step computes it."""
        if decodes and end == seq_cache.prompt_length - 1:
            end += 1
        self._metrics.computed_tokens += end - start
        if self.supports_reuse:
            self._metrics.unavoidable_tokens += end - min(max(start, seq_cache.repeated_tokens), end)

    def _note_sizes(self) -> None:
        metrics, store = self._metrics, self._store
        metrics.evictions = self._evictor.evicted
        metrics.page_bytes = store.tree.runs_usage.nbytes
        metrics.seq_cache_bytes = store.idle_usage.nbytes
        metrics.checkpoint_bytes = store.checkpoints.usage.nbytes
        active = store.active_usage
        metrics.live_bytes = active.nbytes + self.batched_bytes
        metrics.arrays = (store.usage + active).arrays
        metrics.pages = store.tree.count
        metrics.checkpoints = len(store.checkpoints)
        metrics.seq_caches = len(store.seq_caches)


def _last_use(plan: RestorePlan) -> float:
    """Return when what is restored was used last; 0 if nothing is."""
    if plan.reused_in_place:
        return plan.reused_in_place.last_used
    tail = [plan.tail.item] if plan.tail else []
    checkpoint = [plan.checkpoint] if plan.checkpoint else []
    return max((item.last_used for item in (*plan.path, *tail, *checkpoint)), default=0.0)


def _note_given_up(seq_cache: SequenceCache) -> None:
    """Record that nobody else has used the pages that this sequence computed."""
    for page in seq_cache.path:
        page.uses = 0 if page.uses == 1 else page.uses


def _with_disk(restored: Restored, length: int) -> Restored:
    """Return what is restored if the disk gives `length` tokens."""
    stored, repeated = max(restored.stored, length), max(restored.repeated_tokens, length)
    return replace(restored, tokens=length, miss=None, stored=stored, repeated_tokens=repeated)
