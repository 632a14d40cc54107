"""The tree of everything computed: pages of tokens, whose KV lies in a strand or in a run.

    root ── page ── page ── page ──── a strand that holds these pages in its contiguous caches
              └──── page ── page      a run that holds these

A *strand* is one sequence's contiguous caches: those of a running row, or of a finished one that waits to be
handed to the next turn without a copy. A *run* is what is left of a strand that is none any more. Pages know
their tokens; a hash only finds a candidate, equal tokens accept it.

Owned by the engine thread. Arrays are opaque here: those of `cache.arrays`, or anything in tests.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


class Stored(Protocol):
    """Arrays that somebody holds."""

    @property
    def nbytes(self) -> int: ...

    @property
    def arrays(self) -> int: ...


class Divisible(Stored, Protocol):
    """Arrays of consecutive tokens, by leaf; see `cache.arrays.Pieces`."""

    @property
    def token_bytes(self) -> int: ...

    def __len__(self) -> int: ...

    def covers(self, start: int, end: int) -> bool: ...

    def part(self, start: int, end: int) -> Any: ...

    def is_neat(self, index: int, start: int, end: int) -> bool: ...

    def keep(self, index: int, start: int, end: int) -> None: ...


@dataclass(eq=False, slots=True)
class Run:
    """Arrays in which consecutive pages lie, at their own positions. More than these may still be in them.

    Attributes:
        pages: by their ends, in order.
    """

    stored: Divisible
    pages: dict[int, Page] = field(default_factory=dict[int, "Page"])

    @property
    def span(self) -> tuple[int, int]:
        """Positions of the first token and behind the last one; nothing if no page is left."""
        if not self.pages:
            return 0, 0
        return next(iter(self.pages.values())).start, next(reversed(self.pages))

    @property
    def loose_bytes(self) -> int:
        """What goes when the arrays are cut back to the pages."""
        start, end = self.span
        return self.stored.nbytes - self.stored.token_bytes * (end - start)


@dataclass(eq=False, slots=True)
class Strand:
    """Contiguous caches of one sequence.

    Attributes:
        caches: one for each entry of the network; none while they are lent.
        tokens: what they were computed from, in full.
        lent: gives copies of them, while a batch has them.
        path: the pages of these tokens, whoever holds them.
        is_live: a row is using the caches.
        shared_to: up to here the next turn will surely go along; behind it is the reply.
        last_used: seconds on the cache's clock.
        boundaries: ends of the prompt's messages.
        prompt_length, known: tokens of the prompt, and how many of its beginning were ever computed before.
    """

    caches: list[Any]
    root: Page
    tokens: list[int] = field(default_factory=list[int])
    path: list[Page] = field(default_factory=list["Page"])
    is_live: bool = True
    shared_to: int = 0
    last_used: float = 0
    boundaries: tuple[int, ...] = ()
    prompt_length: int = 0
    known: int = 0
    lent: Callable[[], list[Any]] | None = None

    def lend(self, fetch: Callable[[], list[Any]]) -> None:
        """The caches were copied into a batch. `fetch` copies them out of it; here they are let go."""
        self.caches, self.lent = [], fetch

    def take_back(self, caches: list[Any]) -> None:
        self.caches, self.lent = caches, None

    def readable(self) -> list[Any]:
        """Caches that hold the tokens, wherever they are; not to be written to."""
        return self.lent() if self.lent else self.caches

    @property
    def end_page(self) -> Page:
        """The last page that is full."""
        return self.path[-1] if self.path else self.root


@dataclass(eq=False, slots=True)
class Checkpoint:
    """State of whole leaves `len(tail)` tokens behind `page`, and the sliced leaves of that tail.

    Attributes:
        tail_cut: begins with the tail; others on this page may share it.
    """

    page: Page
    tail: tuple[int, ...]
    state: Stored
    tail_cut: Stored | None
    last_used: float

    @property
    def position(self) -> int:
        return self.page.end + len(self.tail)


@dataclass(eq=False, slots=True)
class Page:
    """Consecutive tokens behind a parent page. A page shorter than the others has no children.

    Attributes:
        key: hash over the salt and all tokens up to the end of this page.
        end: tokens up to the end of this page.
        holder: where its tokens lie. None: they are lost (and at the root, there are none).
        by_first_token: the children again.
        strands: those whose last full page this is.
    """

    key: bytes
    parent: Page | None
    tokens: tuple[int, ...]
    end: int
    holder: Run | Strand | None
    last_used: float = 0
    uses: int = 1
    children: dict[bytes, Page] = field(default_factory=dict[bytes, "Page"])
    by_first_token: dict[int, list[Page]] = field(default_factory=dict[int, "list[Page]"])
    checkpoints: list[Checkpoint] = field(default_factory=list[Checkpoint])
    strands: list[Strand] = field(default_factory=list[Strand])

    @property
    def start(self) -> int:
        return self.end - len(self.tokens)

    @property
    def is_leaf(self) -> bool:
        return not (self.children or self.checkpoints or self.strands)

    def beginning_like(self, tokens: Sequence[int]) -> Iterator[Page]:
        """Children whose first token is that of `tokens`."""
        yield from self.by_first_token.get(tokens[0], ()) if tokens else ()


class _Counted(NamedTuple):
    """What is counted of a run."""

    nbytes: int = 0
    arrays: int = 0
    loose_bytes: int = 0


class PageTree:
    """Roots by salt; each a tree of pages of `page_size` tokens.

    Attributes:
        run_bytes, run_arrays: of the runs in which pages lie.
        loose_bytes: of these, what no page lies in.
        untidy: runs that may hold more than their pages need, or in pieces that are too long.
        rejected_keys: candidates with the right key and other tokens.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.run_bytes = self.run_arrays = self.loose_bytes = 0
        self.untidy: dict[Run, None] = {}
        self.count = 0
        self.rejected_keys = 0
        self._roots: dict[bytes, Page] = {}
        self._runs: dict[Run, _Counted] = {}

    @property
    def runs(self) -> list[Run]:
        """Those in which pages lie."""
        return list(self._runs)

    def root(self, salt: bytes) -> Page:
        """Where the pages of a salt begin. A new one takes the place of all that have nothing behind them."""
        known = self._roots.get(salt)
        if known is None:
            self._roots = {other: root for other, root in self._roots.items() if not root.is_leaf}
            key = hashlib.blake2b(salt, digest_size=16).digest()
            known = self._roots[salt] = Page(key, None, (), 0, None)
        return known

    def match(self, root: Page, ids: Sequence[int]) -> list[Page]:
        """The full pages that `ids` begins with."""
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
        """The page of these tokens behind `parent`, if there is one, and its key.

        A key only finds a candidate. One with other tokens is passed over, by a key made from that one.
        """
        key = page_key(parent.key, tokens)
        while (page := parent.children.get(key)) is not None and page.tokens != tokens:
            self.rejected_keys += 1
            key = page_key(key, tokens)
        if page is None and self.rejected_keys:
            # The one that was passed over may be gone, and what was put behind it is still there.
            page = next((one for one in parent.beginning_like(tokens) if one.tokens == tokens), None)
        return key, page

    def insert(self, parent: Page, tokens: tuple[int, ...], holder: Run | Strand, now: float) -> Page:
        """The page of `tokens` behind `parent`: the one that is there, or a new one of this holder.

        A shorter page that says nothing more goes.
        """
        key, known = self._place(parent, tokens)
        if known is not None:
            known.last_used = now
            if known.holder is None:
                self.hold(known, holder)
            return known
        for short in [
            one for one in parent.beginning_like(tokens) if one.tokens == tokens[: len(one.tokens)]
        ]:
            self.remove(short)
        page = Page(key, parent, tokens, parent.end + len(tokens), None, last_used=now)
        parent.children[key] = page
        parent.by_first_token.setdefault(tokens[0], []).append(page)
        self.count += 1
        self.hold(page, holder)
        return page

    def hold(self, page: Page, holder: Run | Strand | None) -> None:
        """Say where the tokens of a page lie from now on. Pages come into a run in order."""
        before, page.holder = page.holder, holder
        if before is holder:
            return
        if isinstance(before, Run):
            del before.pages[page.end]
            self.weigh(before)
        if isinstance(holder, Run):
            holder.pages[page.end] = page
            self.weigh(holder)

    def weigh(self, run: Run) -> None:
        """Count a run whose pages or arrays are others than before. One without pages counts no more."""
        before, after = self._runs.pop(run, _Counted()), _Counted()
        self.untidy.pop(run, None)
        if run.pages:
            after = _Counted(run.stored.nbytes, run.stored.arrays, run.loose_bytes)
            self._runs[run], self.untidy[run] = after, None
        self.run_bytes += after.nbytes - before.nbytes
        self.run_arrays += after.arrays - before.arrays
        self.loose_bytes += after.loose_bytes - before.loose_bytes

    def remove(self, page: Page) -> Page:
        """Forget a page that has nothing behind it. Returns the nearest one in front of it that stays."""
        if not page.is_leaf or page.parent is None:
            raise ValueError("a root, or a page with something behind it, cannot go")
        self.hold(page, None)
        return self.prune(page)

    def prune(self, page: Page) -> Page:
        """Forget this page and those in front of it, as far as they are lost and have nothing behind them."""
        while page.parent is not None and page.holder is None and page.is_leaf:
            parent = page.parent
            del parent.children[page.key]
            alike = parent.by_first_token[page.tokens[0]]
            alike.remove(page)
            if not alike:
                del parent.by_first_token[page.tokens[0]]
            self.count -= 1
            page = parent
        return page

    def has(self, page: Page) -> bool:
        """Whether the page is still there."""
        return page.parent is not None and page.parent.children.get(page.key) is page

    def pages(self) -> Iterator[Page]:
        """Every page but the roots."""
        waiting = list(self._roots.values())
        while waiting:
            page = waiting.pop()
            waiting += page.children.values()
            if page.parent is not None:
                yield page

    def roots(self) -> Iterator[Page]:
        yield from self._roots.values()


def page_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Chain hash: equal keys mean equal tokens all the way from the root, but for a collision."""
    return hashlib.blake2b(array("I", tokens).tobytes(), key=parent, digest_size=16).digest()


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Tokens that two sequences have in common at their beginnings."""
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length
    return next(index for index in range(length) if left[index] != right[index])
