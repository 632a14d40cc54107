"""Store checkpoints, and count their memory. `cache.checkpoints` chooses where they are kept.

Owned by the engine thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from start_llm.cache.pages import Checkpoint, EarlierState, MemoryUsage, Page, PageTree, SequenceCache
from start_llm.core.thread_owners import ENGINE, owned_by

if TYPE_CHECKING:
    from start_llm.cache.arrays import KVSlice, StateSnapshot
    from start_llm.cache.layers import Layers


@owned_by(ENGINE)
class SharedArrays:
    """Counts the memory of what checkpoints hold. A tail that several of them share counts once.

    Attributes:
        usage: memory of all of it.
    """

    def __init__(self) -> None:
        self.usage = MemoryUsage()
        self._holders = Counter[int]()

    def hold(self, part: StateSnapshot | KVSlice | None) -> None:
        """Count one more holder."""
        if part is None:
            return
        self._holders[id(part)] += 1
        if self._holders[id(part)] == 1:
            self.usage += MemoryUsage(part.nbytes, part.arrays)

    def release(self, part: StateSnapshot | KVSlice | None) -> None:
        """Count one holder less."""
        if part is None:
            return
        self._holders[id(part)] -= 1
        if not self._holders[id(part)]:
            del self._holders[id(part)]
            self.usage -= MemoryUsage(part.nbytes, part.arrays)


@owned_by(ENGINE)
class CheckpointStore:
    """The checkpoints of one network. The index of each one's page has it too, by its tail."""

    def __init__(self, layers: Layers, tree: PageTree) -> None:
        self._layers = layers
        self._tree = tree
        self._checkpoints: dict[int, Checkpoint] = {}
        self._states = SharedArrays()

    @owned_by(ENGINE)
    def __iter__(self) -> Iterator[Checkpoint]:
        """Iterate over those that are there now, the oldest first; any of them may be dropped meanwhile."""
        return iter(list(self._checkpoints.values()))

    @owned_by(ENGINE)
    def __len__(self) -> int:
        return len(self._checkpoints)

    @owned_by(ENGINE)
    def __contains__(self, checkpoint: Checkpoint) -> bool:
        return id(checkpoint) in self._checkpoints

    @property
    def usage(self) -> MemoryUsage:
        """Memory of all checkpoints."""
        return self._states.usage

    @property
    def mean_bytes(self) -> float:
        """Bytes of a checkpoint on average; 0 if there is none."""
        return self.usage.nbytes / len(self._checkpoints) if self._checkpoints else 0.0

    def keep(self, seq_cache: SequenceCache, reach: int = 0, ahead: int = 0) -> Checkpoint | None:
        """Add a checkpoint at the end of a sequence cache's tokens. If there is one already, that is as young
        from then on, and None is returned.

        Args:
            reach: tokens by which it should be possible to take its state back, or to the state before it.
            ahead: tokens that its caches hold beyond; see `Layers.state`.
        """
        page = seq_cache.end_page
        tail = tuple(seq_cache.tokens[page.end :])
        for known in page.checkpoints.equal_to(tail):
            known.last_used = max(known.last_used, seq_cache.last_used)
            return None
        tail_cut = _longer_tail(page, tail)
        if tail and tail_cut is None:
            tail_cut = self._layers.cut(seq_cache.caches, page.end, len(seq_cache.tokens))
        if reach and (earlier := _earlier_state(seq_cache)):
            reach = min(reach, earlier.tokens_before)
            earlier = replace(earlier, tokens_before=earlier.tokens_before + ahead)
            state = self._layers.state(seq_cache.caches, reach, earlier, ahead)
        else:
            state = self._layers.state(seq_cache.caches, reach, ahead=ahead)
        checkpoint = Checkpoint(page, tail, state, tail_cut, seq_cache.last_used, kept_by=seq_cache.number)
        self._states.hold(state)
        self._states.hold(tail_cut)
        self._share_tail(checkpoint)
        page.checkpoints.append(checkpoint)
        self._checkpoints[id(checkpoint)] = checkpoint
        return checkpoint

    def _share_tail(self, newest: Checkpoint) -> None:
        """Let checkpoints whose tail is a prefix of the newest one's tail share its arrays."""
        for checkpoint in newest.page.checkpoints.beginnings_of(newest.tail):
            if checkpoint.tail:
                self._states.release(checkpoint.tail_cut)
                checkpoint.tail_cut = newest.tail_cut
                self._states.hold(checkpoint.tail_cut)

    def drop(self, checkpoint: Checkpoint) -> Page:
        """Drop a checkpoint. Returns its page, or the nearest ancestor that remains."""
        del self._checkpoints[id(checkpoint)]
        checkpoint.page.checkpoints.remove(checkpoint)
        self._states.release(checkpoint.state)
        self._states.release(checkpoint.tail_cut)
        page = self._tree.prune(checkpoint.page)
        # Without trimmable leaves a page holds no KV, so without checkpoints below it, it is worth nothing.
        while not self._layers.has_trimmable and page.parent is not None and page.has_nothing_after:
            page = self._tree.remove(page)
        return page

    def drop_kept_by(self, seq_cache: SequenceCache, page: Page) -> None:
        """Drop those of a page's checkpoints that are states of this sequence cache."""
        for checkpoint in [*page.checkpoints]:
            if checkpoint.kept_by == seq_cache.number:
                self.drop(checkpoint)


def _earlier_state(seq_cache: SequenceCache) -> EarlierState | None:
    """Return the last state that was kept of these tokens."""
    for page in reversed([seq_cache.root, *seq_cache.path]):
        if not page.checkpoints:
            continue
        if last := next(page.checkpoints.beginnings_of(page.tail_of(seq_cache)), None):
            return EarlierState(last.state, len(seq_cache.tokens) - last.position)
    return None


def _longer_tail(page: Page, tail: tuple[int, ...]) -> KVSlice | None:
    """Return the arrays of another checkpoint of this page whose tail starts with these tokens."""
    if not tail:
        return None
    return next((checkpoint.tail_cut for checkpoint in page.checkpoints.beginning_with(tail)), None)
