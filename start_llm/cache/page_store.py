"""Store pages, sequence caches and runs, and count their memory; `cache.checkpoint_store` does it for states.

Owned by the engine thread.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import TYPE_CHECKING

from start_llm.cache.checkpoint_store import CheckpointStore
from start_llm.cache.pages import (
    CacheItem,
    Checkpoint,
    Holder,
    MemoryUsage,
    Page,
    PageRun,
    PageTree,
    SequenceCache,
)
from start_llm.core.thread_owners import ENGINE, owned_by

if TYPE_CHECKING:
    from collections.abc import Callable

    from start_llm.cache.arrays import StateSnapshot, TokenRange
    from start_llm.cache.layers import Layers


@owned_by(ENGINE)
class PageStore:
    """Pages, sequence caches, runs and checkpoints of one network.

    Pages on the path of a sequence cache are stored in sequence caches, not in runs, so no page is both in a
    run and in a sequence cache. Sequence caches with a common beginning each have it.

    Attributes:
        tree: the pages.
        checkpoints: the states, each after a page.
        idle_usage: memory of idle sequence caches.
        token_bytes: bytes per token in the trimmable leaves; 0 until some have been computed.
    """

    def __init__(self, layers: Layers, page_size: int) -> None:
        self.layers = layers
        self.tree = PageTree(page_size)
        self.checkpoints = CheckpointStore(layers, self.tree)
        self.token_bytes = 0
        self._seq_caches: dict[int, SequenceCache] = {}
        self._idle: dict[int, MemoryUsage] = {}
        self.idle_usage = MemoryUsage()

    @property
    def seq_caches(self) -> list[SequenceCache]:
        return list(self._seq_caches.values())

    # ------------------------------------------------------------------------------------------- memory usage

    @property
    def active_usage(self) -> MemoryUsage:
        """Memory of active sequence caches, which grow all the time."""
        active = (self.usage_of(seq_cache) for seq_cache in self._seq_caches.values() if seq_cache.is_active)
        return sum(active, MemoryUsage())

    @property
    def usage(self) -> MemoryUsage:
        """Memory of everything except active sequence caches."""
        return self.tree.runs_usage + self.idle_usage + self.checkpoints.usage

    def usage_of(self, seq_cache: SequenceCache) -> MemoryUsage:
        return MemoryUsage(self.layers.nbytes(seq_cache.caches), self.layers.arrays(seq_cache.caches))

    # ---------------------------------------------------------------------------------------- sequence caches

    def admit(self, seq_cache: SequenceCache) -> None:
        """Add an active sequence cache, with the pages that it was restored from."""
        self._seq_caches[id(seq_cache)] = seq_cache
        seq_cache.end_page.seq_caches.append(seq_cache)

    def extend(self, seq_cache: SequenceCache) -> list[Page]:
        """Add the pages that the tokens have filled. Returns all of these, new or not."""
        size = self.tree.page_size
        before = len(seq_cache.path)
        seq_cache.end_page.seq_caches.remove(seq_cache)
        while len(seq_cache.tokens) - seq_cache.end_page.end >= size:
            start = seq_cache.end_page.end
            block = tuple(seq_cache.tokens[start : start + size])
            page = self.tree.insert(seq_cache.end_page, block, seq_cache, seq_cache.last_used)
            if isinstance(page.holder, PageRun):
                self.tree.hold(page, seq_cache)
            seq_cache.path.append(page)
        seq_cache.end_page.seq_caches.append(seq_cache)
        self.token_bytes = self.token_bytes or self.layers.token_bytes(seq_cache.caches)
        return seq_cache.path[before:]

    def make_idle(self, seq_cache: SequenceCache) -> None:
        """Make a sequence cache idle when its sequence has left the engine; it waits for the next turn."""
        seq_cache.is_active = False
        self._idle[id(seq_cache)] = usage = self.usage_of(seq_cache)
        self.idle_usage += usage

    def forget(self, seq_cache: SequenceCache) -> None:
        """Remove a sequence cache from the store. Its pages are not changed."""
        if self._seq_caches.pop(id(seq_cache), None) is None:
            return
        self.idle_usage -= self._idle.pop(id(seq_cache), MemoryUsage())
        seq_cache.end_page.seq_caches.remove(seq_cache)

    def hand_over(self, given: SequenceCache, path: Sequence[Page], length: int) -> SequenceCache:
        """Return an active sequence cache, not admitted yet, with the caches of one that was removed.

        What clients ask to keep after the last full page is carried on; pages and states know it themselves.

        Args:
            path: the full pages of its first `length` tokens, which the caches hold.
        """
        taken = SequenceCache(given.caches, given.root, given.tokens[:length], list(path))
        taken.shared_prefix_length = given.shared_prefix_length
        taken.kept = tuple(place for place in given.kept if taken.end_page.end < place.tokens <= length)
        given.set_caches([])
        for page in path:
            if page.holder is given:
                self.tree.hold(page, taken)
        return taken

    def assemble(
        self,
        seq_cache: SequenceCache,
        tail: TokenRange | None,
        state: StateSnapshot | None,
        length: int,
        room: int,
    ) -> None:
        """Fill the caches of an admitted sequence cache from the pages on its path and from the tail.

        Pages in runs are moved, and their source is freed leaf by leaf, so that little memory is held twice.
        If this fails half way, these pages are lost with the sequence cache.
        """
        parts = [self.part(*stretch) for stretch in _stretches(seq_cache.path)] + ([tail] if tail else [])
        moving = [(page, page.holder) for page in seq_cache.path if isinstance(page.holder, PageRun)]
        runs = list(dict.fromkeys(run for _, run in moving))
        for page, _ in moving:
            self.tree.hold(page, seq_cache)

        def cut_back(index: int) -> None:
            for run in runs:
                run.stored.keep(index, *run.span)

        try:
            seq_cache.caches = self.layers.assemble(parts, state, length, cut_back, room=room)
        finally:
            for run in runs:
                self.tree.recount_run(run)

    def part(self, holder: Holder, start: int, end: int) -> TokenRange:
        """Return views of what a run or a sequence cache holds between these positions."""
        if isinstance(holder, PageRun):
            return holder.stored.part(start, end)
        return self.layers.borrow(holder.readable(), start, end)

    def detach_pages_after(self, seq_cache: SequenceCache, length: int) -> None:
        """Drop a removed sequence cache's pages after `length`; reassign or copy those that are needed."""
        after = [page for page in self._held(seq_cache) if page.end > length]
        while after and after[-1].has_nothing_after:
            self.tree.remove(after.pop())
        self._move_to_others(after)
        if left := [page for page in after if page.holder is seq_cache]:
            run = PageRun(self.layers.cut_out(seq_cache.caches, left[0].start, left[-1].end))
            for page in left:
                self.tree.hold(page, run)

    def split_into_pages(self, seq_cache: SequenceCache) -> None:
        """Remove a sequence cache, and move the pages that only it stores to a run of its arrays."""
        with self.rollback_on_error(seq_cache):
            if self.layers.has_state and seq_cache.tokens:
                self.checkpoints.keep(seq_cache)
            tail = None if self.layers.has_state else self._tail(seq_cache)
            self.forget(seq_cache)
            self.give_up(seq_cache, tail)

    def release_pages(self, seq_cache: SequenceCache) -> None:
        """Remove a sequence cache without a state at its end. Its pages stay, in a run of its arrays."""
        with self.rollback_on_error(seq_cache):
            self.forget(seq_cache)
            self.give_up(seq_cache)

    def give_up(self, seq_cache: SequenceCache, tail: tuple[int, ...] | None = None) -> None:
        """Turn a removed sequence cache's arrays into a run, without a copy, if pages or a tail need them.

        Args:
            tail: tokens after the last full page that are kept as a page of their own.
        """
        self._move_to_others(self._held(seq_cache))
        held = self._held(seq_cache)
        if held or tail:
            run = PageRun(self.layers.give_up(seq_cache.caches))
            for page in held:
                self.tree.hold(page, run)
            if tail:
                page = self.tree.insert(seq_cache.end_page, tail, run, seq_cache.last_used)
                page.uses = 0 if seq_cache.is_given_up else page.uses
                page.kept_until = max(page.kept_until, seq_cache.kept_until)
        seq_cache.set_caches([])

    def _move_to_others(self, pages: list[Page]) -> None:
        """Assign pages to other sequence caches whose caches hold them too."""
        for page in pages:
            if other := self._other_holder(page):
                self.tree.hold(page, other)

    def tidy(self, is_enough: Callable[[], bool]) -> int:
        """Trim runs to their pages, and split long pieces, one leaf after the other until `is_enough`.

        Returns the number of leaves.
        """
        trimmed = 0
        for run in list(self.tree.untrimmed_runs):
            for index in range(len(run.stored)):
                if not run.stored.is_trimmed(index, *run.span):
                    run.stored.keep(index, *run.span)
                    self.tree.recount_run(run)
                    trimmed += 1
                    if is_enough():
                        return trimmed
            self.tree.untrimmed_runs.pop(run, None)
        return trimmed

    def _held(self, seq_cache: SequenceCache) -> list[Page]:
        """Return the pages that this sequence cache stores. Others may store pages before them."""
        return [page for page in seq_cache.path if page.holder is seq_cache]

    def _tail(self, seq_cache: SequenceCache) -> tuple[int, ...] | None:
        """Return the tokens after the last full page; None if there are none, or if others store them too."""
        end = seq_cache.end_page
        tail = tuple(seq_cache.tokens[end.end :])
        is_stored = any(page.holder is not None for page in end.by_tokens.beginning_with(tail))
        is_stored |= any(other is not seq_cache for other in end.seq_caches.beginning_with(tail))
        return tail if tail and not is_stored else None

    def adopt_pages(self, seq_cache: SequenceCache) -> bool:
        """Store all pages on the path in this sequence cache alone, so that the next turn needs no copy.

        Shorter idle sequence caches are split into pages. Returns False, and changes nothing, if an active or
        a longer sequence cache stores some of the pages.
        """
        holders = {
            id(page.holder): page.holder for page in seq_cache.path if isinstance(page.holder, SequenceCache)
        }
        others = [holder for holder in holders.values() if holder is not seq_cache]
        if any(other.is_active or len(other.tokens) > len(seq_cache.tokens) for other in others):
            return False
        for page in seq_cache.path:
            self.tree.hold(page, seq_cache)
        for other in others:
            self.split_into_pages(other)
        return True

    @contextmanager
    def rollback_on_error(self, seq_cache: SequenceCache) -> Generator[None]:
        """Discard this sequence's cache if the block raises."""
        with ExitStack() as undo:
            undo.callback(self.discard, seq_cache)
            yield
            undo.pop_all()

    def discard(self, seq_cache: SequenceCache) -> None:
        """Drop a sequence cache whose content is unknown, with its states. None of it is reused."""
        for page in (seq_cache.root, *seq_cache.path):
            self.checkpoints.drop_kept_by(seq_cache, page)
        self.forget(seq_cache)
        for page in reversed(self._held(seq_cache)):
            self.tree.hold(page, self._other_holder(page))
            self.tree.prune(page)
        seq_cache.set_caches([])
        seq_cache.tokens = []

    def _other_holder(self, page: Page) -> SequenceCache | None:
        """Return another sequence cache whose caches hold the page's tokens too; None if there is none."""
        place = page.end // self.tree.page_size - 1
        filled = (other for other in self._seq_caches.values() if other.caches or other.fetch_from_batch)
        return next((other for other in filled if page in other.path[place : place + 1]), None)

    # ----------------------------------------------------------------------------------------------- eviction

    def is_evictable(self, item: CacheItem) -> bool:
        """Return whether it is in the store, and nothing uses it or depends on it."""
        match item:
            case SequenceCache():
                return not item.is_active and id(item) in self._seq_caches
            case Checkpoint():
                return item in self.checkpoints
            case Page():
                return (
                    item.has_nothing_after
                    and not isinstance(item.holder, SequenceCache)
                    and self.tree.has(item)
                )

    def eviction_candidates(self) -> Iterator[CacheItem]:
        yield from (seq_cache for seq_cache in self._seq_caches.values() if not seq_cache.is_active)
        yield from self.checkpoints
        yield from (page for page in self.tree.pages() if self.is_evictable(page))

    def drop(self, victim: CacheItem) -> list[Checkpoint | Page]:
        """Evict one. Returns what can be evicted next because of it. The pages of a sequence cache stay."""
        match victim:
            case SequenceCache():
                self.split_into_pages(victim)
                end = victim.end_page
                pages = [*victim.path, *end.children.values()]
                return [*end.checkpoints, *(page for page in pages if self.is_evictable(page))]
            case Checkpoint():
                page = self.checkpoints.drop(victim)
            case Page():
                page = self.tree.remove(victim)
        return [page] if self.is_evictable(page) else []


def _stretches(path: list[Page]) -> Iterator[tuple[Holder, int, int]]:
    """Yield the runs and sequence caches that store the path, each with its start and end position.

    Raises:
        ValueError: the KV of a page is lost.
    """
    for _, group in groupby(path, key=lambda page: id(page.holder)):
        pages = list(group)
        if pages[0].holder is None:
            raise ValueError("a page whose KV is lost cannot be restored")
        yield pages[0].holder, pages[0].start, pages[-1].end
