"""What goes when memory is short, and when."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from start_llm.cache.pages import Checkpoint, Page, Strand
from start_llm.cache.store import Store, Weight

type Enough = Callable[[], bool]

_MOST_ARRAYS = 250_000
"""Metal fails for good at 499,000 live buffers; running rows and weights need theirs."""
_RESERVE = 0.02
"""Share of the budget for what counting does not see: allocators round up, steps have arrays of theirs."""
_SLACK = 0.07
"""Share of the budget that is let go beyond what is needed, so that not every chunk looks for something."""
_CHECKPOINTS_SHARE = 0.3
_MOST_ENDS_UNDER_PRESSURE = 24
_UNUSED_UNDER_PRESSURE_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the cache may keep.

    Attributes:
        budget_bytes: for everything that is kept, together with what running rows hold.
        most_ends: conversations. None: as many as there is memory for; if it is short, 24.
        unused_s: age at which a conversation goes, 0 for never. None: 1,800, if memory is short.
        most_arrays: of everything that is kept, and of running rows.
        checkpoint_bytes: share of the budget that states may have.
    """

    budget_bytes: int
    most_ends: int | None = None
    unused_s: float | None = None
    most_arrays: int = _MOST_ARRAYS

    @property
    def checkpoint_bytes(self) -> float:
        return _CHECKPOINTS_SHARE * self.budget_bytes


class Evictor:
    """Keeps a store within its limits. Whatever a running row stands on stays.

    Attributes:
        beside_bytes: what running rows hold outside of their strands: in a batch.
        evicted: conversations, pages, checkpoints and strands that had to go.
    """

    def __init__(self, store: Store, limits: Limits) -> None:
        self._store = store
        self.limits = limits
        self.beside_bytes = 0
        self.evicted = 0

    def has_room_for(self, nbytes: int) -> bool:
        """Whether so many bytes can be kept beside what runs, if all the rest went."""
        return self._live.nbytes + nbytes <= (1 - _RESERVE) * self.limits.budget_bytes

    @property
    def _live(self) -> Weight:
        return self._store.live_weight + Weight(self.beside_bytes)

    def shrink(self, now: float, coming_bytes: int = 0, shortage: int = 0) -> bool:
        """Let go of what is beyond the limits. Returns whether anything went.

        Args:
            coming_bytes: that a row is about to take.
            shortage: bytes that have to go whatever the limits are.
        """
        before = self.evicted
        live = self._live + Weight(coming_bytes)
        self._drop_worst_checkpoints(now)
        if self.limits.unused_s:
            self._drop_unused(now, self.limits.unused_s)
        if self.limits.most_ends is not None:
            self._drop_ends_beyond(self.limits.most_ends)
        if self._is_beyond(self._needed + live, slack=_RESERVE):
            self._relieve(now, live)
        if shortage:
            self._drop_worst(now, self._has_shrunk_by(shortage))
        return self._has_tidied(live, shortage) or self.evicted > before

    @property
    def _needed(self) -> Weight:
        """What is kept, but for what can be cut off."""
        return self._store.weight - Weight(self._store.loose_bytes)

    def _has_tidied(self, live: Weight, shortage: int) -> bool:
        """Cut off as much as the limits demand at once; the rest goes by and by."""

        def is_enough() -> bool:
            return not shortage and not self._is_beyond(self._store.weight + live, slack=_RESERVE)

        if not self._store.loose_bytes or is_enough():
            return False
        self._store.tidy(is_enough)
        return True

    def _has_shrunk_by(self, nbytes: int) -> Enough:
        target = self._store.weight.nbytes - nbytes
        return lambda: self._needed.nbytes <= target

    def _relieve(self, now: float, live: Weight) -> None:
        """Memory is short: first what is old, then what is beyond a number, then the worst of the rest."""
        is_relieved = partial(self._is_within, live)
        if self.limits.unused_s is None:
            self._drop_unused(now, _UNUSED_UNDER_PRESSURE_S, is_relieved)
        if self.limits.most_ends is None:
            self._drop_ends_beyond(_MOST_ENDS_UNDER_PRESSURE, is_relieved)
        self._drop_worst(now, is_relieved)

    def _drop_unused(self, now: float, unused_s: float, is_enough: Enough = lambda: False) -> None:
        for end in sorted(self._store.ends(), key=_last_used):
            if now - _last_used(end) <= unused_s or is_enough():
                return
            self._drop_end(end, lambda page: now - page.last_used <= unused_s)

    def _drop_ends_beyond(self, most: int, is_enough: Enough = lambda: False) -> None:
        ends = sorted(self._store.ends(), key=_last_used)
        for end in ends[: max(len(ends) - most, 0)]:
            if is_enough():
                return
            self._drop_end(end, lambda _: False)

    def _drop_end(self, end: Strand | Page, spare: Callable[[Page], bool]) -> None:
        self._store.drop_end(end, spare)
        self.evicted += 1

    def _drop_worst_checkpoints(self, now: float) -> None:
        """They have a share of the budget; the best one may exceed it alone."""
        most = self.limits.checkpoint_bytes
        if self._store.checkpoint_weight.nbytes <= most:
            return
        worst_first = sorted(self._store.checkpoints, key=lambda one: _ranked(one, now))
        for checkpoint in worst_first[:-1]:
            if self._store.checkpoint_weight.nbytes <= most:
                return
            self._store.drop_checkpoint(checkpoint)
            self.evicted += 1

    def _drop_worst(self, now: float, is_enough: Enough) -> None:
        heap = [_ranked(one, now) for one in self._store.all_that_may_go()]
        heapq.heapify(heap)
        while heap and not is_enough():
            _, _, victim = heapq.heappop(heap)
            # It may be there twice, or be gone with another one.
            if self._store.may_go(victim):
                for one in self._store.drop(victim):
                    heapq.heappush(heap, _ranked(one, now))
                self.evicted += 1

    def _is_within(self, live: Weight) -> bool:
        return not self._is_beyond(self._needed + live, slack=_SLACK)

    def _is_beyond(self, held: Weight, slack: float) -> bool:
        too_many = held.arrays > (1 - slack) * self.limits.most_arrays
        return too_many or held.nbytes > (1 - slack) * self.limits.budget_bytes


def _last_used(end: Strand | Page) -> float:
    checkpoints = end.checkpoints if isinstance(end, Page) else []
    return max(end.last_used, *(one.last_used for one in checkpoints), 0)


def _ranked(one: Strand | Checkpoint | Page, now: float) -> tuple[float, int, Strand | Checkpoint | Page]:
    uses = one.uses if isinstance(one, Page) else 1
    length = one.position if isinstance(one, Checkpoint) else len(one.tokens)
    return reluctance(length=length, uses=uses, age=now - one.last_used), id(one), one


def reluctance(*, length: int, uses: int, age: float) -> float:
    """The smaller, the sooner it goes: old, short and rarely used things before the others.

    Args:
        length: tokens that would have to be computed again, with everything in front of them kept.
        uses: times it was used.
        age: seconds since it was used last.
    """
    return math.sqrt(max(length, 1)) * math.log(1 + max(uses, 1)) / (1 + max(age, 0))
