"""Restore caches as planned, without exceeding the memory budget meanwhile.

Owned by the engine thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from start_llm.cache.arrays import KVSlice, StateSnapshot, TokenRange
from start_llm.cache.pages import Checkpoint, Holder, Page, PageRun, SequenceCache
from start_llm.cache.plan import RestorePlan
from start_llm.core.thread_owners import ENGINE, owned_by

if TYPE_CHECKING:
    from start_llm.cache.eviction import Evictor
    from start_llm.cache.page_store import PageStore
    from start_llm.cache.plan import RestoreSource


@owned_by(ENGINE)
class Restorer:
    """Makes the caches of sequences.

    Attributes:
        store: where they are admitted.
    """

    def __init__(self, store: PageStore, evictor: Evictor) -> None:
        self._layers = store.layers
        self.store = store
        self._evictor = evictor

    def restore(self, plan: RestorePlan, root: Page, ids: tuple[int, ...], room: int) -> SequenceCache:
        """Return an active sequence cache that holds the first `plan.length` tokens of `ids`.

        Args:
            room: tokens that its caches can hold before they grow.
        """
        if plan.reused_in_place:
            return self._taken(plan.reused_in_place, plan, room)
        if not plan.length:
            return self._fresh(root, room)
        return self._copied(plan, root, ids, room)

    def _fresh(self, root: Page, room: int) -> SequenceCache:
        self._evictor.shrink(self.store.token_bytes * room)
        seq_cache = SequenceCache(self._layers.fresh(room), root)
        self.store.admit(seq_cache)
        return seq_cache

    def _taken(self, given: SequenceCache, plan: RestorePlan, room: int) -> SequenceCache:
        """Reuse an idle sequence cache in place. Pages after `plan.length` that others need are copied.

        A sequence that was only preempted goes on from a state that is kept here, and needs what `given`
        records of it, so the caches go to a new sequence cache.
        """
        with self.store.rollback_on_error(given):
            if given.is_paused and self._layers.has_state:
                self.store.checkpoints.keep(given)
            self.store.forget(given)
            self.store.detach_pages_after(given, plan.length)
            if plan.checkpoint:
                self._layers.set_state(given.caches, self._state(plan, plan.checkpoint))
            if plan.length < len(given.tokens):
                self._layers.trim(given.caches, plan.length)
        taken = self.store.hand_over(given, plan.path, plan.length)
        with self.store.rollback_on_error(taken):
            self.store.admit(taken)
            self._evictor.shrink(self.store.token_bytes * max(room - self._layers.room(taken.caches), 0))
            self._layers.reserve(taken.caches, room)
        return taken

    def buffers(
        self, path: tuple[Page, ...], nothing: KVSlice, root: Page, ids: tuple[int, ...], room: int
    ) -> SequenceCache:
        """Return an active sequence cache that holds the pages of `path`, and has `room` for more tokens.

        Args:
            nothing: arrays of the right types for 0 tokens.
        """
        length = path[-1].end if path else 0
        return self._copied(RestorePlan(length, path), root, ids, room, nothing)

    def _copied(
        self,
        plan: RestorePlan,
        root: Page,
        ids: tuple[int, ...],
        room: int,
        nothing: KVSlice | None = None,
    ) -> SequenceCache:
        """Make new caches. The sequence cache is admitted first, which protects the pages on its path."""
        tail = self._tail(plan.tail) if plan.tail else nothing
        state = self._state(plan, plan.checkpoint) if plan.checkpoint else None
        known = plan.path[-1].end if plan.path else 0
        seq_cache = SequenceCache([], root, list(ids[:known]), list(plan.path))
        self.store.admit(seq_cache)
        with self.store.rollback_on_error(seq_cache):
            self._let_holders_go(plan, room)
            self._evictor.shrink(self._bytes_beside(plan, room))
            self.store.assemble(seq_cache, tail, state, plan.length, room)
            seq_cache.tokens = list(ids[: plan.length])
            self.store.extend(seq_cache)
        return seq_cache

    def _state(self, plan: RestorePlan, checkpoint: Checkpoint) -> StateSnapshot:
        """Return the checkpoint's state, taken back to the end of the plan."""
        return self._layers.rewound(checkpoint.state, checkpoint.position - plan.length)

    def _tail(self, tail: RestoreSource) -> TokenRange:
        item = tail.item
        if isinstance(item, Checkpoint):
            return cast("KVSlice", item.tail_cut).part(0, tail.end - tail.start)
        holder = cast("Holder", item.holder) if isinstance(item, Page) else item
        return self.store.part(holder, tail.start, tail.end)

    def _let_holders_go(self, plan: RestorePlan, room: int) -> None:
        """Split idle sequence caches into pages if there is no room for them and a copy of their KV."""
        whole = self.store.token_bytes * max(plan.length, room)
        holders = (page.holder for page in plan.path)
        for holder in dict.fromkeys(holder for holder in holders if isinstance(holder, SequenceCache)):
            needed = self.store.usage_of(holder).nbytes + whole
            if not holder.is_active and not self._evictor.has_room_for(needed):
                self.store.split_into_pages(holder)

    def _bytes_beside(self, plan: RestorePlan, room: int) -> int:
        """Return the bytes of new caches, without pages in runs, whose memory is freed as they are copied."""
        freed = sum(
            page.holder.stored.bytes_of(page.start, page.end)
            for page in plan.path
            if isinstance(page.holder, PageRun)
        )
        return self.store.token_bytes * max(plan.length, room) - freed
