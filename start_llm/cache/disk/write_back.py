"""Choose what is written to the disk tier, and when.

Pages are written when they were used twice, when nobody has used them for a while, when they are evicted,
and at the end; but not while a running sequence changes the caches that they lie in. States are written when
nobody has used them for a while, when they are evicted to make room, and at the end. What a client has given
up is as right as anything else, and its client often comes back, so it is written too; but not when it is
evicted, unless another sequence has used it since. Nothing of a sequence that failed is written: it is not in
the store. What cannot be written is left out, and tried again minutes later and at the end.

Owned by the engine thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from start_llm.cache.conversations import page_before
from start_llm.cache.disk.disk_index import TOKEN_NS
from start_llm.cache.disk.item_files import ItemFiles
from start_llm.cache.disk.superseded_files import superseded_by
from start_llm.cache.pages import CacheItem, Checkpoint, Holder, Page, PageRun, SequenceCache
from start_llm.core.thread_owners import ENGINE, owned_by

if TYPE_CHECKING:
    from start_llm.cache.disk.disk_index import CachedFile
    from start_llm.cache.disk.disk_tier import DiskAccess
    from start_llm.cache.layers import Layers
    from start_llm.cache.page_store import PageStore

_LOOK_S, _LOOK_WHEN_BUSY_S = 1.0, 5.0
"""Seconds between two looks for what is to be written, which take some milliseconds."""
_OFFER_S = 0.1
"""For handing over in one call: a request may have come. The disk's news cause the next call."""
_COPY_SHARE = 0.01
"""Share of the time in which requests are running that may be spent on copying pages."""
_IDLE_WHEN_TIGHT_S = 2.0
"""Seconds without use after which pages are written while memory is short."""


class _Candidate(NamedTuple):
    """Something that may be written.

    Attributes:
        due: seconds on the cache's clock.
        last_used: of it and of all that follows, so that no end is written before its beginning.
        end: tokens up to its end.
    """

    due: float
    last_used: float
    end: int
    item: CacheItem


@owned_by(ENGINE)
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
        self._is_shared = access.is_shared
        self._layers = layers
        self._store = store
        self._files = ItemFiles(layers, store, access.shape)
        self._is_tight = is_tight
        self._clock = clock
        self._due: list[CacheItem] = []
        self._last_look = -math.inf
        self._next_due = 0.0
        self._refusals = 0  # up to the last look
        self._not_before = 0.0

    def offer(self, *, is_busy: bool) -> None:
        """Hand over what is due, as far as the disk thread can take it now.

        Args:
            is_busy: requests are running; then little of the time is spent on this.
        """
        if self._tier.worker.pause_left_s:
            self._due.clear()  # its items hold memory
        end = time.perf_counter() + _OFFER_S
        while self._tier.can_take and not (is_busy and time.perf_counter() < self._not_before):
            item = self._next(_LOOK_WHEN_BUSY_S if is_busy else _LOOK_S)
            if item is None:
                return
            began = time.perf_counter()
            self._write(item)
            now = time.perf_counter()
            self._not_before = now + (now - began) / _COPY_SHARE
            if now >= end:
                return

    def seconds_until_due(self) -> float | None:
        """Return the seconds after which `offer` should be called again; None if something else will come
        first: a request, or the news that the disk thread has written a file.
        """
        if not self._tier.is_on or self._tier.traffic.is_full:
            return None
        if self._due or self._tier.traffic.refusals > self._refusals:
            return max(self._tier.worker.pause_left_s, _LOOK_S)
        if not self._next_due:
            return self._tier.worker.pause_left_s or None
        return max(self._next_due - self._clock(), self._tier.worker.pause_left_s, _LOOK_S)

    def note_change(self) -> None:
        """Look for what is to be written when nothing else runs: a sequence has ended."""
        self._last_look = min(self._last_look, self._clock() - _LOOK_S)

    def flush(self, patience_s: float) -> None:
        """Write everything that is not on the disk yet, the conversations that were used last first.

        What could not be written before is tried once more.
        """
        self._tier.traffic.forget_refusals()
        end = time.perf_counter() + patience_s
        self._write_all(end)
        if self._tier.traffic.wait_for_checks(end - time.perf_counter()):
            self._write_all(end)

    def _write_all(self, end: float) -> None:
        """Write what is not on the disk yet, until this time of `time.perf_counter`."""
        self._due = self._candidates(idle_s=0)
        while self._due and time.perf_counter() < end:
            if self._tier.wait_for_room(end - time.perf_counter()):
                item = self._due.pop()
                if self._is_writable(item):
                    self._write(item)
            elif not self._tier.traffic.is_full:
                return

    def save(self, victim: CacheItem) -> None:
        """Hand something over that is about to be evicted, if it is worth it and there is room."""
        if _is_given_up(victim) or not self._is_writable(victim):
            return
        if self._tier.can_take:
            self._write(victim)
        elif self._tier.is_on:
            self._tier.metrics.note_lost()

    def has(self, item: CacheItem) -> bool:
        """Return whether it is on the disk, or will be."""
        return self._tier.has(self._files.name(item))

    def is_dispensable(self, item: CacheItem) -> bool:
        """Return whether losing it costs little: it is on the disk, or its client gave it up.

        Of several ranks each has a disk of its own, and all have to evict the same, so there the disk does
        not count.
        """
        return _is_given_up(item) or (not self._is_shared and self.has(item))

    def touch(self, path: Sequence[Page]) -> None:
        """Record that memory has served these pages, so that the disk does not take them for unused.

        States behind them count as used with them: without one, pages of a network with state serve nobody.
        """
        if files := [file for page in path for file in self._files_of(page)]:
            self._tier.touch(files)

    def _files_of(self, page: Page) -> Iterator[tuple[CachedFile, int]]:
        """Yield the files of a page and of states behind it, each with the number of tokens before it."""
        index = self._tier.index
        if file := index.get("pages", page.key):
            yield file, page.start
        if self._layers.has_state:
            yield from ((state, page.end) for state in index.after("states", page.key))

    def _next(self, look_s: float) -> CacheItem | None:
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

    def _candidates(self, idle_s: float) -> list[CacheItem]:
        """Return what is due, in reverse, because `pop` takes from the end: conversations used last first,
        their beginnings first. What is refused is due when it may be tried again.
        """
        self._refusals = self._tier.traffic.refusals
        now = self._clock()
        candidates = [
            candidate._replace(due=max(candidate.due, now + self._refused_left_s(candidate.item)))
            for candidate in self._all(idle_s)
            if self._is_missing(candidate.item)
        ]
        self._tier.verify_later(self._unread())
        later = [candidate.due for candidate in candidates if candidate.due > now]
        self._next_due = min(later, default=0.0)
        due = [candidate for candidate in candidates if candidate.due <= now]
        due.sort(key=lambda candidate: (candidate.last_used, -candidate.end))
        return [candidate.item for candidate in due]

    def _unread(self) -> Iterator[CachedFile]:
        """Yield the files that nobody has read since the start, though memory has their content.

        Unless computing is faster, it was computed because a file on the way to them was damaged or missing,
        and they may be damaged as well.
        """
        for item in (*self._store.tree.pages(), *self._store.checkpoints, *self._store.seq_caches):
            file = self._tier.index.get(*self._files.name(item))
            if file and not file.is_verified and not file.is_passed_over:
                yield file

    def _all(self, idle_s: float) -> Iterator[_Candidate]:
        last_uses = self._last_uses()
        for page, last_used in last_uses.items():
            due = page.last_used + (idle_s if page.uses < 2 else 0)
            yield _Candidate(due, last_used, page.end, page)
        for seq_cache in self._store.seq_caches:
            last_used = seq_cache.last_used
            yield _Candidate(last_used + idle_s, last_used, len(seq_cache.tokens), seq_cache)
        for checkpoint in self._store.checkpoints:
            last_used = max(checkpoint.last_used, last_uses.get(checkpoint.page, 0))
            yield _Candidate(checkpoint.last_used + idle_s, last_used, checkpoint.position, checkpoint)

    def _last_uses(self) -> dict[Page, float]:
        """Return when each page, or anything that follows it, was used last."""
        pages = list(self._store.tree.pages())
        latest = {page: page.last_used for page in pages}
        for page in reversed(pages):  # children come before their parents
            behind = [item.last_used for item in (*page.checkpoints, *page.seq_caches)]
            latest[page] = max(latest[page], *behind, 0)
            if page.parent in latest:
                latest[page.parent] = max(latest[page.parent], latest[page])
        return latest

    def _refused_left_s(self, item: CacheItem) -> float:
        return self._tier.traffic.refused_left_s(self._files.name(item))

    def _is_writable(self, item: CacheItem) -> bool:
        """Return whether it may be written now."""
        return self._is_missing(item) and not self._tier.traffic.is_refused(self._files.name(item))

    def _is_missing(self, item: CacheItem) -> bool:
        """Return whether it is worth writing, can be read now, and is not on the disk."""
        match item:
            case Page():
                is_readable = self._store.tree.has(item) and _is_at_rest(item.holder)
            case Checkpoint():
                is_readable = self._store.is_evictable(item)
            case SequenceCache():
                is_readable = self._store.is_evictable(item) and self._has_end(item)
        return is_readable and not self.has(item) and not self._is_too_old(item)

    def _is_too_old(self, item: CacheItem) -> bool:
        """Return whether it would be the first to go from a folder that is full."""
        kept_since_ns = self._tier.folder.kept_since_ns
        if not kept_since_ns:
            return False
        # Its own time nearly always decides; that of its path is as long to find as the path is.
        return self._wall_ns(item.last_used) <= kept_since_ns or self._used_ns(item) <= kept_since_ns

    def _has_end(self, seq_cache: SequenceCache) -> bool:
        """Return whether anything is after its pages: tokens, or a state."""
        return self._layers.has_state or len(seq_cache.tokens) > seq_cache.end_page.end

    def _write(self, item: CacheItem) -> None:
        """Copy it and hand it over. If that fails, the others are written, and it is tried minutes later."""
        self._tier.release_written()  # before there is another copy
        try:
            header, content = self._files.new(item)
        except Exception as error:  # noqa: BLE001 - whatever it is, it concerns this one alone
            self._tier.worker.refuse(self._files.name(item), error)
            return
        superseded = superseded_by(header, page_before(item), self._store.tree.page_size)
        self._tier.write(header, content, self._used_ns(item), superseded)

    def _used_ns(self, item: CacheItem) -> int:
        """Return when it was last used, in wall time; never later than what is before it on its path."""
        parent = page_before(item)
        last_used = min([item.last_used, *(page.last_used for page in _path_to(parent))])
        return self._wall_ns(last_used) - parent.end * TOKEN_NS

    def _wall_ns(self, seconds: float) -> int:
        """Return a time of the cache's clock in wall time."""
        return int((time.time() - (self._clock() - seconds)) * 1e9)


def _path_to(page: Page) -> Iterator[Page]:
    """Yield the pages up to this one, the last one first, without the root."""
    while page.parent is not None:
        yield page
        page = page.parent


def _is_given_up(item: CacheItem) -> bool:
    """Return whether a client gave it up, and nobody else has used it."""
    return not item.uses if isinstance(item, Page) else getattr(item, "is_given_up", False)


def _is_at_rest(holder: Holder | None) -> bool:
    return isinstance(holder, PageRun) or (holder is not None and not holder.is_active)
