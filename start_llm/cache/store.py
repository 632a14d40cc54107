"""Everything that is kept: pages, strands, checkpoints, and what they weigh.

Owned by the engine thread. What is computed where, and what goes when, is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from start_llm.cache.integrity import BrokenInvariant, check_tree
from start_llm.cache.pages import Checkpoint, Page, PageTree, Stored, Strand

if TYPE_CHECKING:
    from collections.abc import Callable

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
    """Pages, strands and checkpoints of one network."""

    def __init__(self, layers: Layers, page_size: int) -> None:
        self.layers = layers
        self.tree = PageTree(page_size)
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
        return Weight(self.tree.own_bytes, self.tree.own_arrays)

    @property
    def resting_weight(self) -> Weight:
        return self._resting_weight

    @property
    def checkpoint_weight(self) -> Weight:
        return self._checkpoint_weight

    @property
    def live_weight(self) -> Weight:
        """Of strands whose rows run; they grow all the time."""
        live = (self._weight(one.caches) for one in self._strands.values() if one.is_live)
        return sum(live, Weight())

    @property
    def weight(self) -> Weight:
        """Of everything but live strands."""
        return self.pages_weight + self._resting_weight + self._checkpoint_weight

    def _weight(self, caches: list[Any]) -> Weight:
        return Weight(self.layers.nbytes(caches), self.layers.arrays(caches))

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
            strand.path.append(self.tree.insert(strand.end_page, block, strand, strand.last_used))
        strand.end_page.strands.append(strand)
        return strand.path[before:]

    def rest(self, strand: Strand) -> None:
        """The row is gone; the caches wait for the next turn."""
        strand.is_live = False
        self._resting[id(strand)] = weight = self._weight(strand.caches)
        self._resting_weight += weight

    def forget(self, strand: Strand) -> None:
        """The strand is no longer one of ours; its pages are not looked at."""
        if self._strands.pop(id(strand), None) is None:
            return
        self._resting_weight -= self._resting.pop(id(strand), Weight())
        strand.end_page.strands.remove(strand)

    def cut_off(self, strand: Strand, length: int) -> None:
        """Pages of the strand behind `length` lose their arrays: copy those that others build on."""
        for page in reversed(self._held(strand)):
            if page.end <= length:
                return
            if page.is_leaf:
                self.tree.remove(page)
            else:
                self.tree.hold(page, self.layers.cut(strand.caches, page.start, page.end))

    def dissolve(self, strand: Strand) -> None:
        """Cut what only this strand holds into pages, and let its caches go."""
        with self.nothing_by_halves(strand):
            if self.layers.has_state and strand.tokens:
                self.keep_state(strand)
            tail = None if self.layers.has_state else self._tail(strand)
            held = self._held(strand)
            spans = [(page.start, page.end) for page in held]
            if tail:
                spans.append((len(strand.tokens) - len(tail), len(strand.tokens)))
            cuts = self.layers.take_apart(strand.caches, spans)
            for page, cut in zip(held, cuts, strict=False):
                self.tree.hold(page, cut)
            if tail:
                self.tree.insert(strand.end_page, tail, cuts[-1], strand.last_used)
        self.forget(strand)
        strand.take_back([])

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
        return next((one for one in self._strands.values() if page in one.path[place : place + 1]), None)

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

    def bytes_per_token(self, strand: Strand) -> float:
        """Of what is kept for every token."""
        return self.layers.sliced_nbytes(strand.caches) / max(len(strand.tokens), 1)

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
        """Let one go. Returns what can go next because of it. A strand is cut into pages first."""
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
            self._cut_what_is_left(end)

    def _cut_what_is_left(self, strand: Strand) -> None:
        """Pages of a forgotten strand that others stand on."""
        with self.nothing_by_halves(strand):
            held = self._held(strand)
            cuts = self.layers.take_apart(strand.caches, [(page.start, page.end) for page in held])
            for page, cut in zip(held, cuts, strict=True):
                self.tree.hold(page, cut)
        strand.take_back([])

    # --------------------------------------------------------------------------------------------- integrity

    def check_integrity(self) -> None:
        """Raises `BrokenInvariant` if anything contradicts anything."""
        check_tree(self.tree, self.strands, self.checkpoints)
        resting = [one for one in self.strands if not one.is_live]
        pages = {id(one.page): one.page for one in self.checkpoints}
        for weight, parts in (
            (self._resting_weight, [self._weight(one.caches) for one in resting]),
            (self._checkpoint_weight, [_checkpoint_weight(page) for page in pages.values()]),
        ):
            if weight != sum(parts, Weight()):
                raise BrokenInvariant(f"{weight} is counted where {sum(parts, Weight())} is")
        for strand in resting:
            length = self.layers.length(strand.caches)
            if length not in (None, len(strand.tokens)):
                raise BrokenInvariant(f"a strand of {len(strand.tokens)} tokens holds {length}")


def _checkpoint_weight(page: Page) -> Weight:
    """Of all that stand on a page. Tails that several of them share count once."""
    tails = {id(one.tail_cut): one.tail_cut for one in page.checkpoints if one.tail_cut is not None}
    parts = [*(one.state for one in page.checkpoints), *tails.values()]
    return sum((Weight(part.nbytes, part.arrays) for part in parts), Weight())
