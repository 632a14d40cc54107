"""Caches made as a plan says, without holding more than the budget while they are made.

Owned by the engine thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from start_llm.cache.arrays import Cut, Part, State
from start_llm.cache.pages import Checkpoint, Page, Run, Strand

if TYPE_CHECKING:
    from collections.abc import Callable

    from start_llm.cache.eviction import Evictor
    from start_llm.cache.layers import Layers
    from start_llm.cache.plan import Plan, Source
    from start_llm.cache.store import Store


class Restorer:
    """Gives rows their caches.

    Args:
        make_room: lets go of what has to, so that so many bytes can be taken.
    """

    def __init__(
        self, layers: Layers, store: Store, evictor: Evictor, make_room: Callable[[int], None]
    ) -> None:
        self._layers = layers
        self._store = store
        self._evictor = evictor
        self._make_room = make_room

    def restore(self, plan: Plan, root: Page, ids: tuple[int, ...], room: int) -> Strand:
        """A live strand that holds the first tokens of `ids`, as many as are planned.

        Args:
            room: tokens that its caches can hold before they grow.
        """
        if plan.hand_over:
            return self._taken(plan.hand_over, plan, root, room)
        if not plan.length:
            return self._fresh(root, room)
        return self._copied(plan, root, ids, room)

    def _fresh(self, root: Page, room: int) -> Strand:
        self._make_room(self._store.token_bytes * room)
        strand = Strand(self._layers.fresh(room), root)
        self._store.admit(strand)
        return strand

    def _taken(self, given: Strand, plan: Plan, root: Page, room: int) -> Strand:
        """A resting strand's own caches. What it has behind `length` is saved or gone."""
        with self._store.nothing_by_halves(given):
            self._store.forget(given)
            self._store.cut_off(given, plan.length)
            if plan.checkpoint:
                self._layers.set_state(given.caches, cast("State", plan.checkpoint.state))
            if plan.length < len(given.tokens):
                self._layers.trim(given.caches, plan.length)
            given.tokens = given.tokens[: plan.length]
            given.path = list(plan.path)
            given.root, given.is_live = root, True
            self._store.admit(given)
            self._make_room(self._store.token_bytes * max(room - self._layers.room(given.caches), 0))
            self._layers.reserve(given.caches, room)
        return given

    def _copied(self, plan: Plan, root: Page, ids: tuple[int, ...], room: int) -> Strand:
        """New caches. While they are made, the strand stands on its pages, so that these cannot go."""
        tail = self._tail(plan.tail) if plan.tail else None
        state = cast("State", plan.checkpoint.state) if plan.checkpoint else None
        known = plan.path[-1].end if plan.path else 0
        strand = Strand([], root, list(ids[:known]), list(plan.path))
        self._store.admit(strand)
        with self._store.nothing_by_halves(strand):
            self._let_holders_go(plan, room)
            self._make_room(self._bytes_beside(plan, room))
            self._store.assemble(strand, tail, state, plan.length, room)
            strand.tokens = list(ids[: plan.length])
        return strand

    def _tail(self, tail: Source) -> Part:
        holder = tail.holder
        if isinstance(holder, Checkpoint):
            return cast("Cut", holder.tail_cut).part(0, tail.end - tail.start)
        if isinstance(holder, Page):
            holder = cast("Run | Strand", holder.holder)
        return self._store.part(holder, tail.start, tail.end)

    def _let_holders_go(self, plan: Plan, room: int) -> None:
        """Strands at rest, if there is no room for them and for a copy of what they hold."""
        whole = self._store.token_bytes * max(plan.length, room)
        for one in {page.holder for page in plan.path if isinstance(page.holder, Strand)}:
            if not one.is_live and not self._evictor.has_room_for(self._store.weight_of(one).nbytes + whole):
                self._store.dissolve(one)

    def _bytes_beside(self, plan: Plan, room: int) -> int:
        """Bytes of new caches, but for pages that come out of runs: these go as they are copied."""
        moved = sum(len(page.tokens) for page in plan.path if isinstance(page.holder, Run))
        return self._store.token_bytes * (max(plan.length, room) - moved)
