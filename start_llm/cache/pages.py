"""The prefix tree: pages of tokens, whose KV is stored in a sequence cache or in a run of pages.

    root ── page ── page ── page ──── a sequence cache that holds these pages in its contiguous caches
              └──── page ── page      a run that holds these

A *sequence cache* holds the contiguous caches of one sequence. It is active while the sequence runs, and idle
when the sequence has finished and the next turn may take the caches without a copy. A *run of pages* holds
the arrays of pages whose sequence cache is gone. Pages know their tokens: a hash finds a candidate, and it is
accepted only if the tokens are equal.

Owned by the engine thread. Nothing here looks into arrays.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from start_llm.cache.tail_index import TailIndex
from start_llm.core.thread_owners import ENGINE, owned_by

if TYPE_CHECKING:
    from start_llm.cache.arrays import KVPieces, KVSlice, StateSnapshot

_next_number = itertools.count().__next__


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Bytes of memory, and the number of arrays that hold them."""

    nbytes: int = 0
    arrays: int = 0

    def __add__(self, other: MemoryUsage) -> MemoryUsage:
        return MemoryUsage(self.nbytes + other.nbytes, self.arrays + other.arrays)

    def __sub__(self, other: MemoryUsage) -> MemoryUsage:
        return MemoryUsage(self.nbytes - other.nbytes, self.arrays - other.arrays)


@dataclass(eq=False, slots=True)
class PageRun:
    """Arrays that hold consecutive pages at their positions. They may also hold other tokens.

    Attributes:
        pages: by end position, in order.
    """

    stored: KVPieces
    pages: dict[int, Page] = field(default_factory=dict[int, "Page"])

    @property
    def span(self) -> tuple[int, int]:
        """Start and end position of the pages; (0, 0) if there are none."""
        if not self.pages:
            return 0, 0
        return next(iter(self.pages.values())).start, next(reversed(self.pages))

    @property
    def unused_run_bytes(self) -> int:
        """Bytes that are freed when the arrays are trimmed to the pages, and quantised if pages are."""
        return self.stored.nbytes - self.stored.bytes_of(*self.span)


class KeptUntil(NamedTuple):
    """The first `tokens` tokens of a sequence stay until `until`, in seconds on the cache's clock."""

    tokens: int
    until: float


@dataclass(eq=False, slots=True)
class SequenceCache:
    """The contiguous caches of one sequence.

    Attributes:
        caches: one for each entry of the network; empty while they are lent to a batch.
        tokens: the tokens that they hold. Decoded tokens are added when the sequence leaves the engine.
        fetch_from_batch: returns copies of the caches while a batch holds them.
        path: the full pages of these tokens, whatever stores them.
        is_active: a running sequence is using the caches.
        is_paused: its sequence was preempted, and goes on later from the end of these tokens.
        is_unopened: read from the disk for a prompt that has not begun with it yet.
        shared_prefix_length: tokens that the next turn is expected to share: the prompt up to the end of its
            last message.
        last_used: seconds on the cache's clock.
        boundaries: ends of the prompt's messages.
        kept: its beginnings that clients ask to keep.
        prompt_length: tokens of the prompt.
        repeated_tokens: those at its beginning that were computed before, or whose messages were.
        is_prompt_counted: all tokens of the prompt were counted as computed or restored.
        is_given_up: its client went away before the reply was complete.
        is_idle_work: nobody asked for it yet, so that it counts as used when its beginning was.
        number: see `Page`.
    """

    caches: list[Any]
    root: Page
    tokens: list[int] = field(default_factory=list[int])
    path: list[Page] = field(default_factory=list["Page"])
    is_active: bool = True
    is_paused: bool = False
    is_unopened: bool = False
    shared_prefix_length: int = 0
    last_used: float = 0
    boundaries: tuple[int, ...] = ()
    kept: tuple[KeptUntil, ...] = ()
    prompt_length: int = 0
    repeated_tokens: int = 0
    is_prompt_counted: bool = False
    is_given_up: bool = False
    is_idle_work: bool = False
    fetch_from_batch: Callable[[], list[Any]] | None = None
    number: int = field(default_factory=_next_number, init=False)

    def move_to_batch(self, fetch: Callable[[], list[Any]]) -> None:
        """Record that the caches were copied into a batch, and drop them. `fetch` copies them out of it."""
        self.caches, self.fetch_from_batch = [], fetch

    def set_caches(self, caches: list[Any]) -> None:
        self.caches, self.fetch_from_batch = caches, None

    def readable(self) -> list[Any]:
        """Return caches that hold the tokens, for reading only; if a batch holds them, return copies."""
        return self.fetch_from_batch() if self.fetch_from_batch else self.caches

    @property
    def end_page(self) -> Page:
        """The last full page, or the root."""
        return self.path[-1] if self.path else self.root

    @property
    def least_taken(self) -> int:
        """Tokens that a prompt must have in common with these to take the caches over: what comes after them
        is cut off.
        """
        is_awaited = self.is_paused or self.is_unopened
        return len(self.tokens) if is_awaited else self.shared_prefix_length

    @property
    def kept_until(self) -> float:
        """Until when a client asks to keep tokens after the last full page; 0 if none does."""
        start, end = self.end_page.end, len(self.tokens)
        return max((place.until for place in self.kept if start < place.tokens <= end), default=0)


@dataclass(eq=False, slots=True)
class Checkpoint:
    """The state of the non-trimmable leaves `len(tail)` tokens after `page`, and the KV of that tail.

    Attributes:
        state: can be taken back by up to `state.reach` tokens.
        tail_cut: the trimmable leaves' arrays. They begin with the tail; other checkpoints of the page may
            share them.
        kept_until: seconds on the cache's clock until which a client asks to keep it.
        kept_by: number of the sequence cache whose state it is.
        number: see `Page`.
    """

    page: Page
    tail: tuple[int, ...]
    state: StateSnapshot
    tail_cut: KVSlice | None
    last_used: float
    kept_until: float = 0
    kept_by: int = -1
    number: int = field(default_factory=_next_number, init=False)

    @property
    def position(self) -> int:
        return self.page.end + len(self.tail)


@dataclass(frozen=True, slots=True)
class EarlierState:
    """A state as it was `tokens_before` tokens before."""

    state: StateSnapshot
    tokens_before: int


@dataclass(eq=False, slots=True)
class Page:
    """Consecutive tokens that follow a parent page. A page shorter than the page size has no children.

    Attributes:
        key: hash of the root's salt and of all tokens up to the end of this page; hashed once more for each
            page with other tokens that has the same.
        end: number of tokens up to the end of this page.
        holder: stores the page's KV. None: the KV is lost (or the page is a root).
        uses: sequences that computed it or were restored from all of it. 0: one, and its client gave it up.
        kept_until: seconds on the cache's clock until which a client asks to keep it.
        number: of two items with the same score, the one with the lower number is evicted first. Processes
            that do the same number them in the same order.
        by_tokens: the children again, by their tokens.
        seq_caches: those whose last full page this is.
    """

    key: bytes
    parent: Page | None
    tokens: tuple[int, ...]
    end: int
    holder: Holder | None
    last_used: float = 0
    uses: int = 1
    kept_until: float = 0
    number: int = field(default_factory=_next_number, init=False)
    children: dict[bytes, Page] = field(default_factory=dict[bytes, "Page"])
    by_tokens: TailIndex[Page] = field(init=False)
    checkpoints: TailIndex[Checkpoint] = field(init=False)
    seq_caches: TailIndex[SequenceCache] = field(init=False)

    def __post_init__(self) -> None:
        self.by_tokens = TailIndex(lambda page: page.tokens)
        self.checkpoints = TailIndex(lambda checkpoint: checkpoint.tail)
        self.seq_caches = TailIndex(self.tail_of)

    @property
    def start(self) -> int:
        return self.end - len(self.tokens)

    @property
    def has_nothing_after(self) -> bool:
        """No page, checkpoint or sequence cache goes on from its end."""
        return not (self.children or self.checkpoints or self.seq_caches)

    def below(self) -> Iterator[Page]:
        """Yield every page that follows this one."""
        waiting = list(self.children.values())
        while waiting:
            page = waiting.pop()
            waiting += page.children.values()
            yield page

    def tail_of(self, seq_cache: SequenceCache) -> tuple[int, ...]:
        """Return the tokens that a sequence cache has after this page."""
        return tuple(seq_cache.tokens[self.end :])


type Holder = PageRun | SequenceCache
"""What stores the KV of pages."""
type CacheItem = Page | Checkpoint | SequenceCache
"""What is evicted, and written to the disk, as one. Of a sequence cache that is written, the end is meant."""
type ConversationEnd = CacheItem
"""An idle sequence cache, or a page or a checkpoint from which nothing goes on."""


@owned_by(ENGINE)
class PageTree:
    """Roots by salt, each with a tree of pages of `page_size` tokens.

    Attributes:
        runs_usage: memory of all runs, unused bytes included.
        unused_run_bytes: bytes of runs that belong to no page.
        untrimmed_runs: runs that may hold more than their pages need, or pieces that are too long.
        rejected_keys: number of candidates with the right key but other tokens.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.runs_usage = MemoryUsage()
        self.unused_run_bytes = 0
        self.untrimmed_runs: dict[PageRun, None] = {}
        self.count = 0
        self.rejected_keys = 0
        self._roots: dict[bytes, Page] = {}
        self._runs: dict[PageRun, tuple[MemoryUsage, int]] = {}

    def root(self, salt: bytes) -> Page:
        """Return the root of a salt. If it is new, roots with nothing below them are dropped."""
        known = self._roots.get(salt)
        if known is None:
            self._roots = {other: root for other, root in self._roots.items() if not root.has_nothing_after}
            key = hashlib.blake2b(salt, digest_size=16).digest()
            known = self._roots[salt] = Page(key, None, (), 0, None)
        return known

    def match(self, root: Page, ids: Sequence[int]) -> list[Page]:
        """Return the full pages that `ids` starts with, as far as their KV is stored."""
        path: list[Page] = []
        page = root
        while len(ids) - page.end >= self.page_size:
            _, child = self._place(page, tuple(ids[page.end : page.end + self.page_size]))
            if child is None or child.holder is None:
                break
            path.append(child)
            page = child
        return path

    def _place(self, parent: Page, tokens: tuple[int, ...]) -> tuple[bytes, Page | None]:
        """Return the key and the page of these tokens after `parent`; the page is None if there is none.

        A key only finds a candidate. If it has other tokens, it is hashed again to give the next key.
        """
        key = page_key(parent.key, tokens)
        while (page := parent.children.get(key)) is not None and page.tokens != tokens:
            self.rejected_keys += 1
            key = page_key(key, tokens)
        if page is None and self.rejected_keys:
            # The candidate that was passed over may be gone, while the page with the next key is still there.
            page = next((page for page in parent.by_tokens.equal_to(tokens) if page.tokens == tokens), None)
        return key, page

    def insert(self, parent: Page, tokens: tuple[int, ...], holder: Holder, now: float) -> Page:
        """Return the page of `tokens` after `parent`: the existing one, or a new one that `holder` stores.

        Shorter pages that are a prefix of a new one are removed; it stays as long as they were to stay.
        """
        key, known = self._place(parent, tokens)
        if known is not None:
            known.last_used, known.uses = max(known.last_used, now), known.uses + 1
            if known.holder is None:
                self.hold(known, holder)
            return known
        page = Page(key, parent, tokens, parent.end + len(tokens), None, last_used=now)
        for short in list(parent.by_tokens.beginnings_of(tokens)):
            page.kept_until = max(page.kept_until, short.kept_until)
            self.remove(short)
        parent.children[key] = page
        parent.by_tokens.append(page)
        self.count += 1
        self.hold(page, holder)
        return page

    def hold(self, page: Page, holder: Holder | None) -> None:
        """Record what stores the KV of a page from now on. Pages must be added to a run in order."""
        before, page.holder = page.holder, holder
        if before is holder:
            return
        if isinstance(before, PageRun):
            del before.pages[page.end]
            self.recount_run(before)
        if isinstance(holder, PageRun):
            holder.pages[page.end] = page
            self.recount_run(holder)

    def recount_run(self, run: PageRun) -> None:
        """Update the counts for a run whose pages or arrays have changed. A run without pages counts 0."""
        usage, unused_bytes = self._runs.pop(run, (MemoryUsage(), 0))
        self.runs_usage -= usage
        self.unused_run_bytes -= unused_bytes
        self.untrimmed_runs.pop(run, None)
        if run.pages:
            usage, unused_bytes = MemoryUsage(run.stored.nbytes, run.stored.arrays), run.unused_run_bytes
            self.runs_usage += usage
            self.unused_run_bytes += unused_bytes
            self._runs[run], self.untrimmed_runs[run] = (usage, unused_bytes), None

    def remove(self, page: Page) -> Page:
        """Remove a page with nothing after it. Returns its nearest ancestor that remains.

        Raises:
            ValueError: it is a root, or it has children, checkpoints or sequence caches.
        """
        if not page.has_nothing_after or page.parent is None:
            raise ValueError("a root, or a page with something after it, cannot go")
        self.hold(page, None)
        return self.prune(page)

    def prune(self, page: Page) -> Page:
        """Remove this page and its ancestors as long as their KV is lost and nothing is after them.

        Returns the first page that remains.
        """
        while page.parent is not None and page.holder is None and page.has_nothing_after:
            parent = page.parent
            del parent.children[page.key]
            parent.by_tokens.remove(page)
            self.count -= 1
            page = parent
        return page

    def has(self, page: Page) -> bool:
        """Return whether the page is still in the tree."""
        return page.parent is not None and page.parent.children.get(page.key) is page

    def pages(self) -> Iterator[Page]:
        """Yield every page except the roots."""
        for root in self.roots():
            yield from root.below()

    def roots(self) -> list[Page]:
        """Return the root of each salt."""
        return list(self._roots.values())


def page_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the chain hash: equal keys mean equal tokens from the root on, except for collisions."""
    return hashlib.blake2b(array("I", tokens).tobytes(), key=parent, digest_size=16).digest()
