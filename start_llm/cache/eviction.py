"""Evict pages, sequence caches and checkpoints when the cache exceeds its limits."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from start_llm.cache.conversations import Conversations, page_before
from start_llm.cache.kept_shares import beyond_their_share
from start_llm.cache.page_store import PageStore
from start_llm.cache.pages import CacheItem, Checkpoint, ConversationEnd, MemoryUsage, Page, SequenceCache
from start_llm.core.thread_owners import ENGINE, owned_by

if TYPE_CHECKING:
    from start_llm.cache.disk.write_back import WriteBack

type Enough = Callable[[], bool]
type Spare = Callable[[CacheItem], bool]

_MAX_ARRAYS = 250_000
"""Metal fails for good at 499,000 live buffers; running sequences and the model's weights need theirs."""
_RESERVE = 0.02
"""Share of the budget for uncounted memory: allocators round up, and steps have their own arrays."""
_SLACK = 0.07
"""Share of the budget that an eviction frees beyond need, so that not every chunk causes one."""
_TIGHT = 0.3
"""Share of the budget: when less of it is free, memory is short."""
_CHECKPOINTS_SHARE = 0.3
_MAX_ENDS_UNDER_PRESSURE = 24
_UNUSED_UNDER_PRESSURE_S = 1800.0


def _never(*_: object) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionLimits:
    """The limits of the cache.

    Attributes:
        budget_bytes: for everything that is kept, together with the caches of running sequences.
        max_conversations: number of conversations. None: no limit, but 24 if memory is short.
        cache_ttl_s: age in seconds at which a conversation is evicted; 0 is never. None: never, but 1,800 if
            memory is short.
        max_arrays: arrays of everything that is kept and of running sequences.
        checkpoint_bytes: bytes of the budget for checkpoints.
    """

    budget_bytes: int
    max_conversations: int | None = None
    cache_ttl_s: float | None = None
    max_arrays: int = _MAX_ARRAYS

    @property
    def checkpoint_bytes(self) -> float:
        return _CHECKPOINTS_SHARE * self.budget_bytes


@owned_by(ENGINE)
class Evictor:
    """Keeps a store within its limits. Whatever a running sequence needs stays.

    Args:
        clock: the cache's clock, in seconds.

    Attributes:
        batched_bytes: bytes that running sequences hold outside of their sequence caches, in a batch.
        evicted: number of evicted conversations, pages and checkpoints, and of sequence caches that were
            split, whose pages stay.
        write_back: writes to the disk tier; None if there is none. What is on the disk is evicted first.
        read_ahead_at: when idle work brought something into memory last. What no request has used yet has
            the age that it would have if it had been used then.
    """

    def __init__(self, store: PageStore, limits: EvictionLimits, clock: Callable[[], float]) -> None:
        self._store = store
        self._conversations = Conversations(store)
        self._clock = clock
        self.limits = limits
        self.batched_bytes = 0
        self.evicted = 0
        self.write_back: WriteBack | None = None
        self.read_ahead_at = 0.0

    def has_room_for(self, nbytes: int) -> bool:
        """Return whether `nbytes` fit beside the running sequences if everything else were evicted."""
        return self._live.nbytes + nbytes <= (1 - _RESERVE) * self.limits.budget_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that can be taken before anything is evicted; 0 or more."""
        held = (self._store.usage + self._live).nbytes
        return max(int((1 - _RESERVE) * self.limits.budget_bytes) - held, 0)

    def is_tight(self) -> bool:
        """Return whether much of what is kept will soon have to be evicted."""
        return self._is_beyond(self._store.usage + self._live, free_share=_TIGHT)

    @property
    def _live(self) -> MemoryUsage:
        return self._store.active_usage + MemoryUsage(self.batched_bytes)

    def shrink(self, coming_bytes: int = 0, shortage: int = 0) -> None:
        """Evict what is beyond the limits, and return memory that is freed to the system.

        Args:
            coming_bytes: bytes that a sequence is about to take.
            shortage: bytes to free even if the limits hold, as far as anything may be evicted.
        """
        now = self._clock()
        before = self.evicted
        active = self._live + MemoryUsage(coming_bytes)
        self._drop_worst_checkpoints(now)
        if self.limits.cache_ttl_s:
            self._drop_unused(now, self.limits.cache_ttl_s, never_used_at=self.read_ahead_at)
        if self.limits.max_conversations is not None:
            self._drop_ends_beyond(self.limits.max_conversations)
        if self._is_beyond(self._needed + active, free_share=_RESERVE):
            self._relieve(now, active)
        if shortage:
            self._drop_worst(now, self._has_shrunk_by(shortage))
        if self._has_tidied(active, shortage) or self.evicted > before:
            self._store.layers.release()

    @property
    def _needed(self) -> MemoryUsage:
        """Memory of everything that is kept, without the bytes of runs that belong to no page."""
        return self._store.usage - MemoryUsage(self._store.tree.unused_run_bytes)

    def _has_tidied(self, active: MemoryUsage, shortage: int) -> bool:
        """Trim runs until the limits hold. `PromptCache.tidy` trims the rest later.

        Returns whether there was a reason to.
        """

        def is_enough() -> bool:
            return not shortage and not self._is_beyond(self._store.usage + active, free_share=_RESERVE)

        if not self._store.tree.unused_run_bytes or is_enough():
            return False
        self._store.tidy(is_enough)
        return True

    def _has_shrunk_by(self, nbytes: int) -> Enough:
        target = self._store.usage.nbytes - nbytes
        return lambda: self._needed.nbytes <= target

    def _relieve(self, now: float, active: MemoryUsage) -> None:
        """Evict until enough is free: old conversations first, then excess ones, then the lowest scores."""
        is_relieved = partial(self._is_within, active)
        is_kept = self._keeping(now)
        if self.limits.cache_ttl_s is None:
            self._drop_unused(now, _UNUSED_UNDER_PRESSURE_S, is_relieved, is_kept)
        if self.limits.max_conversations is None:
            self._drop_ends_beyond(_MAX_ENDS_UNDER_PRESSURE, is_relieved, is_kept)
        self._drop_worst(now, is_relieved)

    def _drop_unused(
        self,
        now: float,
        cache_ttl_s: float,
        is_enough: Enough = _never,
        is_kept: Spare = _never,
        never_used_at: float = 0.0,
    ) -> None:
        def is_young(last_used: float) -> bool:
            return now - (last_used or never_used_at) <= cache_ttl_s

        def is_spared(item: CacheItem) -> bool:
            return is_young(item.last_used) or is_kept(item)

        for end in _oldest_first(end for end in self._conversations.ends() if not is_young(end.last_used)):
            if is_enough():
                return
            self._drop_end(end, is_spared)

    def _drop_ends_beyond(self, most: int, is_enough: Enough = _never, is_kept: Spare = _never) -> None:
        ends = list(self._conversations.ends())
        excess = len(ends) - most
        for end in _oldest_first(ends)[:excess] if excess > 0 else ():
            if is_enough():
                return
            self._drop_end(end, is_kept)

    def _drop_end(self, end: ConversationEnd, spare: Spare) -> None:
        """Drop a conversation. Of a sequence cache whose last tokens are to stay, the pages stay."""
        if spare(end):
            if isinstance(end, SequenceCache):
                self._store.drop(end)
                self.evicted += 1
            return
        for item in self._conversations.items(end, spare):  # beginnings first: ends are worthless without
            self._save(item)
        self._conversations.drop(end, spare)
        self.evicted += 1

    def _save(self, victim: CacheItem) -> None:
        """Hand something over to the disk tier before it goes."""
        if self.write_back:
            self.write_back.save(victim)

    def _drop_worst_checkpoints(self, now: float) -> None:
        """Drop the lowest-scored checkpoints beyond their share of the budget, but never the best one."""
        most = self.limits.checkpoint_bytes
        if self._store.checkpoints.usage.nbytes <= most:
            return
        is_kept = self._keeping(now)
        worst_first = sorted(
            self._store.checkpoints, key=lambda state: (is_kept(state), *_scored(state, now))
        )
        for checkpoint in worst_first[:-1]:
            if self._store.checkpoints.usage.nbytes <= most:
                return
            self._save(checkpoint)
            self._store.checkpoints.drop(checkpoint)
            self.evicted += 1

    def _keeping(self, now: float) -> Callable[[CacheItem], bool]:
        """Return whether a client asks to keep something, within the share of its key. Of a sequence cache,
        the tokens after its pages are meant.
        """
        limits = self.limits
        beyond = beyond_their_share(self._store, limits.budget_bytes, limits.checkpoint_bytes, now)

        def is_kept(item: CacheItem) -> bool:
            if item.kept_until <= now:
                return False
            before = page_before(item)
            return item not in beyond and before not in beyond

        return is_kept

    def _drop_worst(self, now: float, is_enough: Enough) -> None:
        ranked = partial(self._ranked, now, self._keeping(now))
        heap = [ranked(item) for item in self._store.eviction_candidates()]
        heapq.heapify(heap)
        while heap and not is_enough():
            victim = heapq.heappop(heap)[-1]
            # The heap may hold it twice, or another eviction may have removed it.
            if self._store.is_evictable(victim):
                if not isinstance(victim, SequenceCache):  # its pages stay
                    self._save(victim)
                for item in self._store.drop(victim):
                    heapq.heappush(heap, ranked(item))
                self.evicted += 1

    def _ranked(
        self, now: float, is_kept: Callable[[CacheItem], bool], item: CacheItem
    ) -> tuple[bool, bool, float, int, CacheItem]:
        """Return what sorts victims: last what a client asks to keep, first what the disk has too."""
        is_dispensable = bool(self.write_back and self.write_back.is_dispensable(item))
        stays = is_kept(item) and not isinstance(item, SequenceCache)  # its pages outlive it
        return stays, not is_dispensable, *_scored(item, now)

    def _is_within(self, active: MemoryUsage) -> bool:
        return not self._is_beyond(self._needed + active, free_share=_SLACK)

    def _is_beyond(self, held: MemoryUsage, free_share: float) -> bool:
        too_many = held.arrays > (1 - free_share) * self.limits.max_arrays
        return too_many or held.nbytes > (1 - free_share) * self.limits.budget_bytes


def _oldest_first(ends: Iterable[ConversationEnd]) -> list[ConversationEnd]:
    return sorted(ends, key=lambda end: (end.last_used, end.number))


def _scored(item: CacheItem, now: float) -> tuple[float, int, CacheItem]:
    uses = item.uses if isinstance(item, Page) else 1
    length = item.position if isinstance(item, Checkpoint) else len(item.tokens)
    return retention_score(length=length, uses=uses, age=now - item.last_used), item.number, item


def retention_score(*, length: int, uses: int, age: float) -> float:
    """Return the score by which victims are chosen, the lowest first: old, short and rarely used ones.

    Args:
        length: tokens that would have to be recomputed if everything before them is kept.
        uses: number of uses.
        age: seconds since the last use.
    """
    return math.sqrt(max(length, 1)) * math.log(1 + max(uses, 1)) / (1 + max(age, 0))
