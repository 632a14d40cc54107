"""The prompt cache: store computed prompts, and restore the longest cached prefix of a new one.

    opener.open     restore a prompt's longest cached prefix into caches that the sequence continues from
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
from dataclasses import replace
from typing import Any

from start_llm.cache.cache_counts import CacheCounts
from start_llm.cache.checkpoints import CheckpointKeeper
from start_llm.cache.disk.disk_restore import DiskRestorer
from start_llm.cache.disk.disk_tier import DiskAccess
from start_llm.cache.disk.followed_restores import FollowedRestores
from start_llm.cache.disk.prompt_disk import PromptDisk
from start_llm.cache.disk.write_back import WriteBack
from start_llm.cache.eviction import EvictionLimits, Evictor
from start_llm.cache.kept_shares import note_kept
from start_llm.cache.layers import Layers
from start_llm.cache.opening import SequenceOpener
from start_llm.cache.page_store import PageStore
from start_llm.cache.pages import SequenceCache
from start_llm.cache.prompt_lookup import PromptLookup
from start_llm.cache.restore import Restorer
from start_llm.core.thread_owners import ENGINE, owned_by
from start_llm.telemetry.metrics import CacheMetrics


@owned_by(ENGINE)
class PromptCache:
    """The KV and state of one network that outlive their requests.

    Args:
        limits: of what is kept. If there are none, or if a layer's cache is of a class that cannot be stored,
            nothing outlives its request, and every prompt is computed in full.
        page_size: tokens of a full page.
        identity: fingerprint of the weights and of all else that KV depends on; see `models.identity`.
        clock: returns seconds.

    Attributes:
        supports_reuse: computed tokens can be restored.
        opener: restores prompts into caches, and tells what it would restore.
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
        self._counts = CacheCounts(
            self._metrics, self._store, self._evictor, supports_reuse=self.supports_reuse
        )
        self.opener = SequenceOpener(
            supports_reuse=self.supports_reuse,
            lookup=self._lookup,
            restorer=self._restorer,
            checkpoints=self._checkpoints,
            disk=self.disk,
            counts=self._counts,
            clock=clock,
        )
        self._shrinks_later = self._is_shrink_due = False

    @property
    def passes_checkpoints(self) -> bool:
        """Whether a chunk may go on behind a checkpoint position, since states can be taken back to it."""
        return self.supports_reuse and self._layers.window > 0

    # ------------------------------------------------------------------------------------------ from the disk

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
        self._counts.note_computed(seq_cache, start, len(seq_cache.tokens), decodes=decodes)
        if not self.supports_reuse:
            return
        self._extend(seq_cache)
        if keep_state:
            self._checkpoints.keep(seq_cache, self._clock(), ahead)
        note_kept(seq_cache)
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

        They are those of a sequence that the `opener` has opened, or were taken out of a batch.

        Args:
            is_given_up: its client went away before the reply was complete.
            is_paused: it was preempted, and goes on later; see `SequenceOpener.reopen`.
        """
        if not self.supports_reuse:
            self.discard(seq_cache)
            return
        with self._store.rollback_on_error(seq_cache):
            self._note_use(seq_cache)
            seq_cache.set_caches(caches)
            self._layers.compact(caches)
            seq_cache.tokens = list(tokens)
            self._extend(seq_cache)
            note_kept(seq_cache)
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
        if self._shrinks_later:
            self._is_shrink_due = True
        elif self.supports_reuse:
            self._is_shrink_due = False
            self._evictor.shrink(shortage=shortage)
            self._counts.note_sizes()

    @contextmanager
    def shrinking_later(self) -> Generator[None]:
        """Evict nothing in the block. Call `shrink_if_due` behind it, once for all that its sequences have
        computed or left: each time, the memory of every sequence is counted.
        """
        self._shrinks_later = True
        try:
            yield
        finally:
            self._shrinks_later = False

    def shrink_if_due(self) -> None:
        """Evict what a block of `shrinking_later` has put off."""
        if self._is_shrink_due:
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
        self._counts.note_sizes()
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


def _note_given_up(seq_cache: SequenceCache) -> None:
    """Record that nobody else has used the pages that this sequence computed."""
    for page in seq_cache.path:
        page.uses = 0 if page.uses == 1 else page.uses
