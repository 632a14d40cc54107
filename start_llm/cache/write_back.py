"""Choose what is written to the disk tier, and when.

Pages are written when they were used twice, when nobody has used them for a while, and at the end. States are
written when nobody has used them for a while, and at the end. Nothing of a sequence that was given up or that
failed is written, unless another one has used it since.

Owned by the engine thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

from start_llm.cache.buffers import Outgoing, outgoing
from start_llm.cache.page_file import FileHeader
from start_llm.cache.pages import Checkpoint, Page, PageRun, SequenceCache, page_key

if TYPE_CHECKING:
    from start_llm.cache.arrays import KVSlice, StateSnapshot
    from start_llm.cache.disk_index import CachedFile, DiskIndex, FileName
    from start_llm.cache.disk_tier import DiskAccess
    from start_llm.cache.layers import Layers
    from start_llm.cache.store import PageStore

_LOOK_S, _LOOK_WHEN_BUSY_S = 1.0, 5.0
"""Seconds between two looks for what is to be written, which take some milliseconds."""
_COPY_SHARE = 0.03
"""Share of the time in which requests are running that may be spent on copying pages."""
_IDLE_WHEN_TIGHT_S = 2.0
"""Seconds without use after which pages are written while memory is short."""
_MOST_STATES = 6
"""States up to and including a new one, of one conversation on the disk."""

type Writable = Page | Checkpoint | SequenceCache
"""What can be written: a page, a checkpoint, or the end of an idle sequence cache."""


class _Candidate(NamedTuple):
    """Something that may be written.

    Attributes:
        due: seconds on the cache's clock.
        end: tokens up to its end.
    """

    due: float
    last_used: float
    end: int
    item: Writable


class WriteBack:
    """Hands pages and states of a store to the disk tier, one at a time.

    Args:
        is_tight: memory is short: what is not written soon will be evicted.
        clock: the cache's clock, in seconds.
    """

    def __init__(
        self,
        access: DiskAccess,
        layers: Layers,
        store: PageStore,
        *,
        is_tight: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._tier = access.tier
        self._idle_s = access.idle_s
        self._shape = access.shape
        self._layers = layers
        self._store = store
        self._is_tight = is_tight
        self._clock = clock
        self._due: list[Writable] = []
        self._last_look = -math.inf
        self._next_due = 0.0
        self._not_before = 0.0

    # -------------------------------------------------------------------------------------------------- when

    def offer(self, *, is_busy: bool) -> None:
        """Hand over what is due, as far as the disk thread can take it now.

        Args:
            is_busy: requests are running; then little of the time is spent on this.
        """
        while self._tier.can_take and not (is_busy and time.perf_counter() < self._not_before):
            item = self._next(_LOOK_WHEN_BUSY_S if is_busy else _LOOK_S)
            if item is None:
                return
            began = time.perf_counter()
            self._write(item)
            now = time.perf_counter()
            self._not_before = now + (now - began) / _COPY_SHARE

    def seconds_until_due(self) -> float | None:
        """Return the seconds after which `offer` should be called again; None if something else will come
        first: a request, or the news that the disk thread has written a file.
        """
        if not self._tier.is_on or self._tier.is_full:
            return None
        if self._due:
            return max(self._tier.pause_left_s, _LOOK_S)
        if not self._next_due:
            return None
        return max(self._next_due - self._clock(), self._tier.pause_left_s, _LOOK_S)

    def note_change(self) -> None:
        """Look for what is to be written when nothing else runs: a sequence has ended."""
        self._last_look = min(self._last_look, self._clock() - _LOOK_S)

    def flush(self, patience_s: float) -> None:
        """Write everything that is not on the disk yet, the conversations that were used last first."""
        end = time.perf_counter() + patience_s
        self._due = self._candidates(idle_s=0)
        while self._due and time.perf_counter() < end:
            if self._tier.wait_for_room(end - time.perf_counter()):
                self._tier.release_written()
                self._write(self._due.pop())
            elif not self._tier.is_full:
                return

    def save(self, victim: Writable) -> None:
        """Hand something over that is about to be evicted, if it is worth it and there is room."""
        if not self._is_writable(victim):
            return
        if self._tier.can_take:
            self._write(victim)
        elif self._tier.is_on:
            self._tier.metrics.lost += 1

    def has(self, item: Writable) -> bool:
        """Return whether it is on the disk, or will be."""
        return self._tier.has(self._name(item))

    def _next(self, look_s: float) -> Writable | None:
        now = self._clock()
        if not self._due and now >= self._last_look + look_s:
            self._last_look = now
            idle_s = min(self._idle_s, _IDLE_WHEN_TIGHT_S) if self._is_tight() else self._idle_s
            self._due = self._candidates(idle_s)
        while self._due:
            item = self._due.pop()
            if self._is_writable(item):
                return item
        return None

    def _candidates(self, idle_s: float) -> list[Writable]:
        """Return what is due, the last first: pages of conversations that were used last, by position."""
        found = [one for one in self._all(idle_s) if self._is_writable(one.item)]
        now = self._clock()
        later = [one.due for one in found if one.due > now]
        self._next_due = min(later, default=0.0)
        due = [one for one in found if one.due <= now]
        return [one.item for one in sorted(due, key=lambda one: (one.last_used, -one.end))]

    def _all(self, idle_s: float) -> Iterator[_Candidate]:
        for page in self._store.tree.pages():
            due = page.last_used + (idle_s if page.uses < 2 else 0)
            yield _Candidate(due, page.last_used, page.end, page)
        for one in self._store.seq_caches:
            yield _Candidate(one.last_used + idle_s, one.last_used, len(one.tokens), one)
        for one in self._store.checkpoints:
            yield _Candidate(one.last_used + idle_s, one.last_used, one.position, one)

    def _is_writable(self, item: Writable) -> bool:
        """Return whether it is worth writing, can be read now, and is not on the disk."""
        match item:
            case Page():
                is_readable = item.uses > 0 and self._store.tree.has(item) and _is_at_rest(item.holder)
            case Checkpoint():
                is_readable = self._store.is_evictable(item)
            case SequenceCache():
                is_readable = self._store.is_evictable(item) and not item.is_given_up and self._has_end(item)
        return is_readable and not self.has(item)

    def _has_end(self, seq_cache: SequenceCache) -> bool:
        """Return whether anything is after its pages: tokens, or a state."""
        return self._layers.has_state or len(seq_cache.tokens) > seq_cache.end_page.end

    # -------------------------------------------------------------------------------------------------- what

    def _name(self, item: Writable) -> FileName:
        match item:
            case Page():
                return "pages", item.key
            case Checkpoint():
                return "states", page_key(item.page.key, item.tail)
            case SequenceCache():
                kind = "states" if self._layers.has_state else "pages"
                return kind, page_key(item.end_page.key, item.tokens[item.end_page.end :])

    def _write(self, item: Writable) -> None:
        parent, tokens, content, numbers = self._content(item)
        kind, key = self._name(item)
        header = FileHeader(kind, key, parent.key, tokens, content.tensors, numbers)
        states_beyond = partial(_states_beyond, _keys(parent), header, self._store.tree.page_size)
        self._tier.write(header, content, partial(_shorter, header) if kind == "pages" else states_beyond)

    def _content(self, item: Writable) -> tuple[Page, tuple[int, ...], Outgoing, tuple[tuple[int, ...], ...]]:
        """Return the page before it, its tokens, its tensors and its numbers."""
        match item:
            case Page():
                if item.parent is None or item.holder is None:
                    raise ValueError("a root, or a page whose KV is lost, cannot be written")
                part = self._store.part(item.holder, item.start, item.end)
                return item.parent, item.tokens, outgoing(self._layers.copied(part)), ()
            case Checkpoint():
                state, page = cast("StateSnapshot", item.state), item.page
                tail = cast("KVSlice | None", item.tail_cut)
                kv = self._layers.copied(tail.part(0, len(item.tail))) if tail else self._shape.nothing()
                return page, item.tail, outgoing(kv, state), _numbers(state)
            case SequenceCache():
                page = item.end_page
                tokens = tuple(item.tokens[page.end :])
                kv = (
                    self._layers.cut(item.caches, page.end, len(item.tokens))
                    if tokens
                    else self._shape.nothing()
                )
                state = self._layers.state(item.caches) if self._layers.has_state else None
                return page, tokens, outgoing(kv, state), _numbers(state) if state else ()


def _shorter(header: FileHeader, index: DiskIndex) -> list[CachedFile]:
    """Return the shorter pages that a new one begins with."""
    return [
        file
        for file in index.after("pages", header.parent)
        if file.header
        and len(file.header.tokens) < len(header.tokens)
        and header.tokens[: len(file.header.tokens)] == file.header.tokens
    ]


def _keys(page: Page | None) -> list[bytes]:
    """Return the keys of a page and of all before it, the root's first."""
    keys: list[bytes] = []
    while page is not None:
        keys.append(page.key)
        page = page.parent
    return keys[::-1]


def _states_beyond(
    path: Sequence[bytes], newest: FileHeader, page_size: int, index: DiskIndex
) -> list[CachedFile]:
    """Return the states before a new one that are too many beside it.

    The first one stays, because other conversations share it. Of the others those go that save the fewest
    tokens.

    Args:
        path: keys of the pages before the new state, the root's first.
    """
    end = (len(path) - 1) * page_size + len(newest.tokens)
    states = sorted(
        ((position, file) for position, file in _states_on(path, page_size, index) if position < end),
        key=lambda one: one[0],
    )
    beyond: list[CachedFile] = []
    while len(states) >= _MOST_STATES:
        saved = {place: states[place][0] - states[place - 1][0] for place in range(1, len(states))}
        beyond.append(states.pop(min(saved, key=lambda place: saved[place]))[1])
    return beyond


def _states_on(path: Sequence[bytes], page_size: int, index: DiskIndex) -> Iterator[tuple[int, CachedFile]]:
    """Yield the states on a path with their positions; one that was not read yet counts as at its page."""
    for depth, key in enumerate(path):
        for file in index.after("states", key):
            yield depth * page_size + (len(file.header.tokens) if file.header else 0), file


def _numbers(state: StateSnapshot) -> tuple[tuple[int, ...], ...]:
    return tuple(numbers for _, numbers in state.leaves)


def _is_at_rest(holder: PageRun | SequenceCache | None) -> bool:
    return isinstance(holder, PageRun) or (holder is not None and not holder.is_active)
