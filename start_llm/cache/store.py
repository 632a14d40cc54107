"""Everything that is kept: pages, strands, runs, checkpoints, and what they weigh.

Owned by the engine thread. What is computed where, and what goes when, is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from start_llm.cache.integrity import BrokenInvariant, check_tree
from start_llm.cache.pages import Checkpoint, Page, PageTree, Run, Stored, Strand

if TYPE_CHECKING:
    from collections.abc import Callable

    from start_llm.cache.arrays import Part, State
    from start_llm.cache.layers import Layers


@dataclass(frozen=True, slots=True)
class Weight:
    """Bytes of memory, and the number of arrays that they are in."""

    nbytes: int = 0
    arrays: int = 0

    def __add__(self, other: Weight) -> Weight:
        return Weight(self.nbytes + other.nbytes, self.arrays + other.arrays)

    def __sub__(self, other: Weight) -> Weight:
        return Weight(self.nbytes - other.nbytes, self.arrays - other.arrays)


class Store:
    """Pages, strands, runs and checkpoints of one network.

    A page on the path of a strand lies in this strand or in another one, never in a run: what a row needs is
    not kept beside it.

    Attributes:
        token_bytes: of each token in the sliced leaves; 0 until some are seen.
    """

    def __init__(self, layers: Layers, page_size: int) -> None:
        self.layers = layers
        self.tree = PageTree(page_size)
        self.token_bytes = 0
        self._strands: dict[int, Strand] = {}
        self._checkpoints: dict[int, Checkpoint] = {}
        self._resting: dict[int, Weight] = {}
        self._resting_weight = Weight()
        self._checkpoint_weight = Weight()

    @property
    def strands(self) -> list[Strand]:
        return list(self._strands.values())

    @property
    def checkpoints(self) -> list[Checkpoint]:
        return list(self._checkpoints.values())

    # --------------------------------------------------------------------------------------------- the weight

    @property
    def pages_weight(self) -> Weight:
        """Of runs, with what is still to be cut off them."""
        return Weight(self.tree.run_bytes, self.tree.run_arrays)

    @property
    def loose_bytes(self) -> int:
        """Of runs, what no page lies in; `tidy` lets it go."""
        return self.tree.loose_bytes

    @property
    def resting_weight(self) -> Weight:
        return self._resting_weight

    @property
    def checkpoint_weight(self) -> Weight:
        return self._checkpoint_weight

    @property
    def live_weight(self) -> Weight:
        """Of strands whose rows run; they grow all the time."""
        live = (self.weight_of(one) for one in self._strands.values() if one.is_live)
        return sum(live, Weight())

    @property
    def weight(self) -> Weight:
        """Of everything but live strands."""
        return self.pages_weight + self._resting_weight + self._checkpoint_weight

    def weight_of(self, strand: Strand) -> Weight:
        return Weight(self.layers.nbytes(strand.caches), self.layers.arrays(strand.caches))

    # ----------------------------------------------------------------------------------------------- strands

    def admit(self, strand: Strand) -> None:
        """A live strand, with the pages that it was restored from."""
        self._strands[id(strand)] = strand
        strand.end_page.strands.append(strand)

    def extend(self, strand: Strand) -> list[Page]:
        """Add the pages that the strand's tokens have filled. Returns all of these, new or not."""
        size = self.tree.page_size
        before = len(strand.path)
        strand.end_page.strands.remove(strand)
        while len(strand.tokens) - strand.end_page.end >= size:
            start = strand.end_page.end
            block = tuple(strand.tokens[start : start + size])
            page = self.tree.insert(strand.end_page, block, strand, strand.last_used)
            if isinstance(page.holder, Run):
                self.tree.hold(page, strand)
            strand.path.append(page)
        strand.end_page.strands.append(strand)
        self.token_bytes = self.token_bytes or self.layers.token_bytes(strand.caches)
        return strand.path[before:]

    def rest(self, strand: Strand) -> None:
        """The row is gone; the caches wait for the next turn."""
        strand.is_live = False
        self._resting[id(strand)] = weight = self.weight_of(strand)
        self._resting_weight += weight

    def forget(self, strand: Strand) -> None:
        """The strand is no longer one of ours; its pages are not looked at."""
        if self._strands.pop(id(strand), None) is None:
            return
        self._resting_weight -= self._resting.pop(id(strand), Weight())
        strand.end_page.strands.remove(strand)

    def assemble(
        self, strand: Strand, tail: Part | None, state: State | None, length: int, room: int
    ) -> None:
        """Fill the caches of an admitted strand from the pages on its path, and with what is behind them.

        Pages that lie in runs lie in the strand from now on. What they were copied from goes leaf by leaf, so
        that little is there twice. If that fails half way, these pages are lost with the strand.
        """
        parts = [self.part(*stretch) for stretch in _stretches(strand.path)] + ([tail] if tail else [])
        moving = [(page, page.holder) for page in strand.path if isinstance(page.holder, Run)]
        runs = list(dict.fromkeys(run for _, run in moving))
        for page, _ in moving:
            self.tree.hold(page, strand)

        def cut_back(index: int) -> None:
            for run in runs:
                run.stored.keep(index, *run.span)

        try:
            strand.caches = self.layers.assemble(parts, state, length, cut_back, room=room)
        finally:
            for run in runs:
                self.tree.weigh(run)

    def part(self, holder: Run | Strand, start: int, end: int) -> Part:
        """Views of what a run or a strand has between these positions."""
        if isinstance(holder, Run):
            return holder.stored.part(start, end)
        return self.layers.borrow(holder.readable(), start, end)

    def cut_off(self, strand: Strand, length: int) -> None:
        """Pages behind `length` of a forgotten strand lose their arrays: copy those that others build on."""
        behind = [page for page in self._held(strand) if page.end > length]
        while behind and behind[-1].is_leaf:
            self.tree.remove(behind.pop())
        self._move_to_others(behind)
        if left := [page for page in behind if page.holder is strand]:
            run = Run(self.layers.cut_out(strand.caches, left[0].start, left[-1].end))
            for page in left:
                self.tree.hold(page, run)

    def dissolve(self, strand: Strand) -> None:
        """Let what only this strand holds lie in a run of its arrays, and the strand go."""
        with self.nothing_by_halves(strand):
            if self.layers.has_state and strand.tokens:
                self.keep_state(strand)
            tail = None if self.layers.has_state else self._tail(strand)
            self.forget(strand)
            self._give_up(strand, tail)

    def _give_up(self, strand: Strand, tail: tuple[int, ...] | None = None) -> None:
        """Put the arrays of a forgotten strand into a run, as they are, if pages or a tail need them."""
        self._move_to_others(self._held(strand))
        held = self._held(strand)
        if held or tail:
            run = Run(self.layers.give_up(strand.caches))
            for page in held:
                self.tree.hold(page, run)
            if tail:
                self.tree.insert(strand.end_page, tail, run, strand.last_used)
        strand.take_back([])

    def _move_to_others(self, pages: list[Page]) -> None:
        """Let pages lie in other strands whose caches hold them too."""
        for page in pages:
            if other := self._other_holder(page):
                self.tree.hold(page, other)

    def tidy(self, is_enough: Callable[[], bool]) -> None:
        """Cut runs back to their pages, and long pieces of them to short ones, one leaf after the other."""
        for run in list(self.tree.untidy):
            for index in range(len(run.stored)):
                if not run.stored.is_neat(index, *run.span):
                    run.stored.keep(index, *run.span)
                    self.tree.weigh(run)
                    if is_enough():
                        return
            self.tree.untidy.pop(run, None)

    def _held(self, strand: Strand) -> list[Page]:
        """Pages that lie in this strand. Those in front of them may lie elsewhere."""
        return [page for page in strand.path if page.holder is strand]

    def _tail(self, strand: Strand) -> tuple[int, ...] | None:
        """What is behind the last full page, unless something else begins with it."""
        end = strand.end_page
        tail = tuple(strand.tokens[end.end :])
        others = [page.tokens for page in end.beginning_like(tail) if page.holder is not None]
        others += [tuple(one.tokens[end.end :]) for one in end.strands if one is not strand]
        return tail if tail and not any(tokens[: len(tail)] == tail for tokens in others) else None

    def take_over(self, strand: Strand) -> bool:
        """Let the pages of this strand lie in its caches alone, if nobody needs those that they lie in now.

        So it can be handed to the next turn, and nothing is stored twice. Shorter strands that rest give way.
        """
        holders = {id(page.holder): page.holder for page in strand.path if isinstance(page.holder, Strand)}
        others = [one for one in holders.values() if one is not strand]
        if any(one.is_live or len(one.tokens) > len(strand.tokens) for one in others):
            return False
        for page in strand.path:
            self.tree.hold(page, strand)
        for one in others:
            self.dissolve(one)
        return True

    @contextmanager
    def nothing_by_halves(self, strand: Strand) -> Generator[None]:
        """What fails in the block, most likely for want of memory, takes the strand with it and no more."""
        with ExitStack() as undo:
            undo.callback(self.discard, strand)
            yield
            undo.pop_all()

    def discard(self, strand: Strand) -> None:
        """Nobody knows what the strand's caches hold: nothing of them is ever reused."""
        self.forget(strand)
        for page in reversed(self._held(strand)):
            self.tree.hold(page, self._other_holder(page))
            self.tree.prune(page)
        strand.take_back([])

    def _other_holder(self, page: Page) -> Strand | None:
        """Another strand in whose caches the page's tokens lie too."""
        place = page.end // self.tree.page_size - 1
        filled = (one for one in self._strands.values() if one.caches or one.lent)
        return next((one for one in filled if page in one.path[place : place + 1]), None)

    # ------------------------------------------------------------------------------------------- checkpoints

    def keep_state(self, strand: Strand) -> Checkpoint | None:
        """A checkpoint at the strand's end; None if there is one already."""
        page = strand.end_page
        tail = tuple(strand.tokens[page.end :])
        if any(one.tail == tail for one in page.checkpoints):
            return None
        tail_cut = self._longer_tail(page, tail)
        if tail and tail_cut is None:
            tail_cut = self.layers.cut(strand.caches, page.end, len(strand.tokens))
        checkpoint = Checkpoint(page, tail, self.layers.state(strand.caches), tail_cut, strand.last_used)
        with self._weighing_checkpoints(page):
            self._share_tail(checkpoint)
            page.checkpoints.append(checkpoint)
        self._checkpoints[id(checkpoint)] = checkpoint
        return checkpoint

    def _longer_tail(self, page: Page, tail: tuple[int, ...]) -> Stored | None:
        """What another checkpoint of this page has of these tokens."""
        if not tail:
            return None
        return next((one.tail_cut for one in page.checkpoints if one.tail[: len(tail)] == tail), None)

    def _share_tail(self, newest: Checkpoint) -> None:
        """Checkpoints on the way to the newest one need no arrays of their own for what is in its tail."""
        for one in newest.page.checkpoints:
            if one.tail and newest.tail[: len(one.tail)] == one.tail:
                one.tail_cut = newest.tail_cut

    @contextmanager
    def _weighing_checkpoints(self, page: Page) -> Generator[None]:
        """Count what the block changes among the checkpoints of a page."""
        before = _checkpoint_weight(page)
        yield
        self._checkpoint_weight += _checkpoint_weight(page) - before

    def drop_checkpoint(self, checkpoint: Checkpoint) -> Page:
        """Let one go. Returns its page, or the nearest one in front of it that stays."""
        del self._checkpoints[id(checkpoint)]
        with self._weighing_checkpoints(checkpoint.page):
            checkpoint.page.checkpoints.remove(checkpoint)
        page = self.tree.prune(checkpoint.page)
        # Without sliced leaves a page is worth nothing but the states behind it, and no budget would see it.
        while not self.layers.is_sliced and page.parent is not None and page.is_leaf:
            page = self.tree.remove(page)
        return page

    # ------------------------------------------------------------------------------------------ what may go

    def may_go(self, one: Strand | Checkpoint | Page) -> bool:
        """Whether it is still there, and nobody uses it or stands on it."""
        match one:
            case Strand():
                return not one.is_live and id(one) in self._strands
            case Checkpoint():
                return id(one) in self._checkpoints
            case Page():
                return one.is_leaf and not isinstance(one.holder, Strand) and self.tree.has(one)

    def all_that_may_go(self) -> Iterator[Strand | Checkpoint | Page]:
        yield from (one for one in self._strands.values() if not one.is_live)
        yield from self._checkpoints.values()
        yield from (page for page in self.tree.pages() if self.may_go(page))

    def drop(self, victim: Strand | Checkpoint | Page) -> list[Checkpoint | Page]:
        """Let one go. Returns what can go next because of it. Of a strand, its pages stay."""
        match victim:
            case Strand():
                self.dissolve(victim)
                end = victim.end_page
                pages = [*victim.path, *end.children.values()]
                return [*end.checkpoints, *(page for page in pages if self.may_go(page))]
            case Checkpoint():
                page = self.drop_checkpoint(victim)
            case Page():
                page = self.tree.remove(victim)
        return [page] if self.may_go(page) else []

    def ends(self) -> Iterator[Strand | Page]:
        """Where conversations end: strands that rest, and pages with nothing but state behind them."""
        yield from (one for one in self._strands.values() if not one.is_live)
        yield from (page for page in self.tree.pages() if not page.children and not page.strands)

    def drop_end(self, end: Strand | Page, spare: Callable[[Page], bool]) -> None:
        """Let a conversation go, as far back as nothing else stands on it and `spare` does not hold."""
        page = end
        if isinstance(page, Strand):
            self.forget(page)
            page = page.end_page
        while page.parent is not None and not (page.children or page.strands or spare(page)):
            for checkpoint in list(page.checkpoints):
                self.drop_checkpoint(checkpoint)
            if self.tree.has(page):
                self.tree.remove(page)
            page = page.parent
        if isinstance(end, Strand):
            self._give_up(end)

    # --------------------------------------------------------------------------------------------- integrity

    def check_integrity(self) -> None:
        """Raises `BrokenInvariant` if anything contradicts anything."""
        check_tree(self.tree, self.strands, self.checkpoints)
        resting = [one for one in self.strands if not one.is_live]
        pages = {id(one.page): one.page for one in self.checkpoints}
        for weight, parts in (
            (self._resting_weight, [self.weight_of(one) for one in resting]),
            (self._checkpoint_weight, [_checkpoint_weight(page) for page in pages.values()]),
        ):
            if weight != sum(parts, Weight()):
                raise BrokenInvariant(f"{weight} is counted where {sum(parts, Weight())} is")
        for strand in resting:
            length = self.layers.length(strand.caches)
            if length not in (None, len(strand.tokens)):
                raise BrokenInvariant(f"a strand of {len(strand.tokens)} tokens holds {length}")


def _stretches(path: list[Page]) -> Iterator[tuple[Run | Strand, int, int]]:
    """Where the pages lie: each run or strand, and between which positions in it."""
    for _, group in groupby(path, key=lambda page: id(page.holder)):
        pages = list(group)
        if pages[0].holder is not None:
            yield pages[0].holder, pages[0].start, pages[-1].end


def _checkpoint_weight(page: Page) -> Weight:
    """Of all that stand on a page. Tails that several of them share count once."""
    tails = {id(one.tail_cut): one.tail_cut for one in page.checkpoints if one.tail_cut is not None}
    parts = [*(one.state for one in page.checkpoints), *tails.values()]
    return sum((Weight(part.nbytes, part.arrays) for part in parts), Weight())
