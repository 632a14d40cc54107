"""Computed prompts, kept and given back.

    open       what is known of a prompt, as caches that go on from there
    grew       a chunk was computed: its pages can be shared from now on
    close      the row is gone: its caches rest, or are cut into pages
    shrink     back within the budget

Owned by the engine thread.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

from start_llm.cache.checkpoints import places, superseded
from start_llm.cache.eviction import reluctance
from start_llm.cache.integrity import BrokenInvariant, check_tree
from start_llm.cache.layers import Cut, Layers, State
from start_llm.cache.pages import Checkpoint, Page, PageTree, Strand
from start_llm.cache.plan import Plan, Source, plan_restore
from start_llm.telemetry.metrics import CacheMetrics

_SHRUNK_TO = 0.95


@dataclass(frozen=True, slots=True)
class Opened:
    """Caches for a prompt.

    Attributes:
        strand: live; its `tokens` are what needs no computing.
        stops: positions at which prefill has to stop, so that state can be kept there.
    """

    strand: Strand
    stops: tuple[int, ...]


class PromptCache:
    """All state of one model that outlives its request.

    Args:
        budget_bytes: for everything that no running row holds.
        page_size: tokens of a full page.
    """

    def __init__(self, layers: Layers, *, budget_bytes: int, page_size: int, metrics: CacheMetrics) -> None:
        self._layers = layers
        self._budget = budget_bytes
        self._tree = PageTree(page_size)
        self._metrics = metrics
        self._strands: list[Strand] = []
        self._checkpoints: list[Checkpoint] = []
        self._clock = 0

    # ---------------------------------------------------------------------------------------------- a request

    def open(self, ids: tuple[int, ...], salt: bytes, boundaries: Sequence[int]) -> Opened:
        """Restore the longest known beginning of `ids`, at least one token short of all."""
        self._clock += 1
        root = self._tree.root(salt)
        plan = plan_restore(self._tree, root, ids, has_state=self._layers.has_state)
        strand = self._taken(plan, root) if plan.hand_over else self._copied(plan, root, ids)
        strand.last_used = self._clock
        for page in plan.path:
            page.last_used, page.uses = self._clock, page.uses + 1
        if plan.checkpoint:
            plan.checkpoint.last_used = self._clock
        self._strands.append(strand)
        strand.end_page.strands.append(strand)
        self._note(plan)
        return Opened(strand, self._stops(strand, ids, boundaries))

    def _stops(self, strand: Strand, ids: tuple[int, ...], boundaries: Sequence[int]) -> tuple[int, ...]:
        ends = [min(end, len(ids) - 1) for end in boundaries]
        strand.shared_to = ends[-1] if ends else len(ids) - 1
        if not self._layers.has_state:
            return ()
        matched = len(self._tree.match(strand.root, ids)) * self._tree.page_size
        return tuple(places(ends, len(strand.tokens), len(ids), matched))

    def _taken(self, plan: Plan, root: Page) -> Strand:
        """A resting strand's own caches, without a copy. What it has behind `length` is saved or gone."""
        given = cast("Strand", plan.hand_over)
        with self._nothing_by_halves(given):
            self._forget_strand(given)
            self._cut_off(given, plan.length)
            if plan.checkpoint:
                self._layers.set_state(given.caches, cast("State", plan.checkpoint.state))
        if plan.length < len(given.tokens):
            self._layers.trim(given.caches, plan.length)
        given.tokens = given.tokens[: plan.length]
        given.path = list(plan.path)
        given.root, given.is_live = root, True
        return given

    def _cut_off(self, strand: Strand, length: int) -> None:
        """Pages of the strand behind `length` lose their arrays: copy those that others build on."""
        for page in reversed([page for page in strand.path if page.end > length and page.holder is strand]):
            if page.is_leaf:
                self._tree.remove(page)
            else:
                self._tree.hold(page, self._layers.cut(strand.caches, page.start, page.end))

    def _copied(self, plan: Plan, root: Page, ids: tuple[int, ...]) -> Strand:
        if not plan.length:
            return Strand(self._layers.fresh(), root)
        cuts = [self._cut_of(source) for source in plan.sources]
        state = cast("State", plan.checkpoint.state) if plan.checkpoint else None
        caches = self._layers.assemble(cuts, state, plan.length)
        return Strand(caches, root, list(ids[: plan.length]), list(plan.path))

    def _cut_of(self, source: Source) -> Cut:
        holder = source.holder
        if isinstance(holder, Checkpoint):
            return cast("Cut", holder.tail_cut)
        if isinstance(holder, Strand):
            return self._layers.view(holder.caches, source.start, source.end)
        if isinstance(holder.holder, Strand):
            return self._layers.view(holder.holder.caches, source.start, source.end)
        whole = cast("Cut", holder.holder)
        return whole.part(source.start - holder.start, source.end - holder.start)

    def _note(self, plan: Plan) -> None:
        self._metrics.lookups += 1
        self._metrics.hits += 1 if plan.length else 0
        self._metrics.reused_tokens += plan.length
        self._metrics.handed_over += 1 if plan.hand_over else 0

    # ------------------------------------------------------------------------------------------------ growing

    def grew(self, strand: Strand, tokens: Sequence[int], *, keep_state: bool) -> None:
        """The strand's caches hold these tokens more. `keep_state`: this is one of the stops."""
        strand.tokens += tokens
        self._add_pages(strand)
        if keep_state:
            self._add_checkpoint(strand)
        self._settle()

    def _add_pages(self, strand: Strand) -> None:
        size = self._tree.page_size
        strand.end_page.strands.remove(strand)
        while len(strand.tokens) - strand.end_page.end >= size:
            start = strand.end_page.end
            block = tuple(strand.tokens[start : start + size])
            strand.path.append(self._tree.insert(strand.end_page, block, strand, self._clock))
        strand.end_page.strands.append(strand)

    def _add_checkpoint(self, strand: Strand) -> None:
        page = strand.end_page
        tail = tuple(strand.tokens[page.end :])
        if any(one.tail == tail for one in page.checkpoints):
            return
        tail_cut = self._layers.cut(strand.caches, page.end, len(strand.tokens)) if tail else None
        state = self._layers.state(strand.caches)
        checkpoint = Checkpoint(page, tail, state, tail_cut, strand.last_used)
        page.checkpoints.append(checkpoint)
        self._checkpoints.append(checkpoint)
        while poor := superseded(checkpoint, self._bytes_per_token(strand)):
            self._drop_checkpoint(poor)

    def _bytes_per_token(self, strand: Strand) -> float:
        return self._layers.sliced_nbytes(strand.caches) / max(len(strand.tokens), 1)

    # ------------------------------------------------------------------------------------------------ the end

    def close(self, strand: Strand, caches: list[Any], tokens: Sequence[int]) -> None:
        """The row is gone. `caches` hold exactly `tokens`; they are this strand's, or came out of a batch."""
        with self._nothing_by_halves(strand):
            strand.caches = caches
            self._layers.settle(caches)
            strand.tokens = list(tokens)
            self._add_pages(strand)
            strand.shared_to = min(strand.shared_to, len(strand.tokens))
            strand.is_live = False
            # If its beginning is stored elsewhere, it would be stored twice.
            is_fork = bool(strand.path) and strand.path[0].holder is not strand
            if is_fork or not strand.tokens or self._has_twin(strand):
                self._dissolve(strand)
        self._settle()

    def _has_twin(self, strand: Strand) -> bool:
        return any(one is not strand and one.tokens == strand.tokens for one in strand.end_page.strands)

    def _dissolve(self, strand: Strand) -> None:
        """Cut what only this strand holds into pages, and let its caches go."""
        with self._nothing_by_halves(strand):
            for page in strand.path:
                if page.holder is strand:
                    self._tree.hold(page, self._layers.cut(strand.caches, page.start, page.end))
            if self._layers.has_state and strand.tokens:
                self._add_checkpoint(strand)
            else:
                self._add_tail(strand)
        self._forget_strand(strand)
        strand.caches = []

    def _add_tail(self, strand: Strand) -> None:
        """A short page of what is behind the last full one, unless something there begins with it."""
        end = strand.end_page
        tail = tuple(strand.tokens[end.end :])
        others = [page.tokens for page in end.children.values() if page.holder is not None]
        others += [tuple(one.tokens[end.end :]) for one in end.strands if one is not strand]
        if tail and not any(tokens[: len(tail)] == tail for tokens in others):
            cut = self._layers.cut(strand.caches, end.end, len(strand.tokens))
            self._tree.insert(end, tail, cut, strand.last_used)

    def _forget_strand(self, strand: Strand) -> None:
        self._strands = [one for one in self._strands if one is not strand]
        end = strand.end_page
        end.strands = [one for one in end.strands if one is not strand]

    @contextmanager
    def _nothing_by_halves(self, strand: Strand) -> Generator[None]:
        """What fails in the block, most likely for want of memory, takes the strand with it and no more."""
        with ExitStack() as undo:
            undo.callback(self.discard, strand)
            yield
            undo.pop_all()

    def discard(self, strand: Strand) -> None:
        """The row failed, and nobody knows what its caches hold: nothing of them is ever reused."""
        self._forget_strand(strand)
        for page in reversed(strand.path):
            if page.holder is strand:
                self._tree.hold(page, self._other_holder(page))
                self._tree.prune(page)
        strand.caches = []

    def _other_holder(self, page: Page) -> Strand | None:
        """Another strand in whose caches the page's tokens lie too."""
        place = page.end // self._tree.page_size - 1
        return next((one for one in self._strands if page in one.path[place : place + 1]), None)

    # --------------------------------------------------------------------------------------------- the budget

    @property
    def stored_bytes(self) -> int:
        """Bytes of everything but live strands."""
        resting = sum(self._layers.nbytes(one.caches) for one in self._strands if not one.is_live)
        return self._tree.own_bytes + resting + sum(one.nbytes for one in self._checkpoints)

    def _settle(self) -> None:
        """Back within the budget, and counted."""
        self.shrink()
        self._metrics.stored_bytes = self.stored_bytes
        self._metrics.pages = self._tree.count
        self._metrics.checkpoints = len(self._checkpoints)
        self._metrics.strands = len(self._strands)

    def shrink(self) -> None:
        """If the budget is exceeded, let go of what is least worth keeping, and a little more."""
        if self.stored_bytes <= self._budget:
            return
        heap = [self._ranked(one) for one in self._candidates()]
        heapq.heapify(heap)
        while heap and self.stored_bytes > _SHRUNK_TO * self._budget:
            _, _, victim = heapq.heappop(heap)
            # It may be there twice, or be gone with another one.
            if self._may_go(victim):
                for one in self._drop(victim):
                    heapq.heappush(heap, self._ranked(one))
                self._metrics.evictions += 1
        self._layers.release()

    def _candidates(self) -> Iterator[Strand | Checkpoint | Page]:
        yield from (one for one in self._strands if not one.is_live)
        yield from self._checkpoints
        yield from (page for page in self._tree.pages() if self._may_go(page))

    def _may_go(self, one: Strand | Checkpoint | Page) -> bool:
        match one:
            case Strand():
                return not one.is_live and any(other is one for other in one.end_page.strands)
            case Checkpoint():
                return any(other is one for other in one.page.checkpoints)
            case Page():
                return one.is_leaf and not isinstance(one.holder, Strand) and self._tree.has(one)

    def _drop(self, victim: Strand | Checkpoint | Page) -> list[Checkpoint | Page]:
        """Let one go. Returns what can go next because of it."""
        match victim:
            case Strand():
                self._dissolve(victim)
                end = victim.end_page
                pages = [*victim.path, *end.children.values()]
                return [*end.checkpoints, *(page for page in pages if self._may_go(page))]
            case Checkpoint():
                page = self._drop_checkpoint(victim)
            case Page():
                page = self._tree.remove(victim)
        return [page] if self._may_go(page) else []

    def _ranked(self, one: Strand | Checkpoint | Page) -> tuple[float, int, Strand | Checkpoint | Page]:
        uses = one.uses if isinstance(one, Page) else 1
        length = one.position if isinstance(one, Checkpoint) else len(one.tokens)
        return reluctance(length=length, uses=uses, age=self._clock - one.last_used + 1), id(one), one

    def _drop_checkpoint(self, checkpoint: Checkpoint) -> Page:
        """Let one go. Returns its page, or the nearest one in front of it that stays."""
        self._checkpoints = [one for one in self._checkpoints if one is not checkpoint]
        page = checkpoint.page
        page.checkpoints = [one for one in page.checkpoints if one is not checkpoint]
        return self._tree.prune(page)

    def check_integrity(self) -> None:
        """Raises `BrokenInvariant` if anything contradicts anything."""
        check_tree(self._tree, self._strands, self._checkpoints)
        for strand in self._strands:
            length = self._layers.length(strand.caches)
            if not strand.is_live and length not in (None, len(strand.tokens)):
                raise BrokenInvariant(f"a strand of {len(strand.tokens)} tokens holds {length}")


class NoReuse:
    """In place of a cache: every prompt is computed."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self._root = PageTree(1).root(b"")

    def open(self, ids: tuple[int, ...], salt: bytes, boundaries: Sequence[int]) -> Opened:  # noqa: ARG002
        return Opened(Strand(self._layers.fresh(), self._root), ())

    def grew(self, strand: Strand, tokens: Sequence[int], *, keep_state: bool) -> None:
        pass

    def close(self, strand: Strand, caches: list[Any], tokens: Sequence[int]) -> None:
        pass

    def discard(self, strand: Strand) -> None:
        pass
