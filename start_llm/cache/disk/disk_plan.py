"""Plan restores of prompts from the disk tier; `cache.disk.disk_restore` carries them out. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from start_llm.cache.disk.disk_index import CachedFile, DiskIndex
from start_llm.cache.pages import Page, page_key
from start_llm.cache.plan import in_front_of_image
from start_llm.core.common_beginning import common_length

_LEAST_GAIN = 16
"""Tokens that a restore from the disk must save at least."""
_MOST_READ = 32
"""Files whose headers are read for one prompt."""


@dataclass(frozen=True, slots=True)
class DiskPlan:
    """A plan for caches that hold the first `length` tokens of a prompt.

    Attributes:
        path: pages in memory that the caches begin with.
        pages: files with the full pages after them, in order.
        last: a page whose beginning is what follows the full pages; it may have more tokens than are needed.
        state: file with the state at the end, and with the tokens since the last page.
        is_cut: see `cache.plan.RestorePlan`.
    """

    length: int
    path: tuple[Page, ...]
    pages: tuple[CachedFile, ...] = ()
    last: CachedFile | None = None
    state: CachedFile | None = None
    is_cut: bool = False

    @property
    def files(self) -> tuple[CachedFile, ...]:
        return (*self.pages, *(file for file in (self.last, self.state) if file))


@dataclass(frozen=True, slots=True)
class PageChain:
    """The full pages that a prompt starts with: first those in memory, then those on disk.

    Attributes:
        matched, files: those in memory, and those on disk.
        keys: key of the prefix after 0, 1, 2 ... pages.
    """

    matched: list[Page]
    files: list[CachedFile]
    keys: list[bytes]
    page_size: int

    @classmethod
    def of(
        cls, index: DiskIndex, root: Page, matched: list[Page], ids: Sequence[int], page_size: int
    ) -> PageChain:
        files: list[CachedFile] = []
        keys = [root.key, *(page.key for page in matched)]
        end = len(matched) * page_size
        while len(ids) - end >= page_size:
            block = tuple(ids[end : end + page_size])
            file = index.get("pages", page_key(keys[-1], block))
            if file is None or (file.header and file.header.tokens != block):
                break
            files.append(file)
            keys.append(file.key)
            end += page_size
        return cls(matched, files, keys, page_size)

    def until(self, end: int) -> PageChain:
        """Return the pages that end at this token or before it."""
        depth = end // self.page_size
        files = self.files[: max(depth - len(self.matched), 0)]
        return PageChain(self.matched[:depth], files, self.keys[: depth + 1], self.page_size)

    def plan(self, length: int, depth: int, last: CachedFile | None, state: CachedFile | None) -> DiskPlan:
        """Return a plan with the first `depth` pages."""
        in_memory = self.matched[:depth]
        pages = self.files[: max(depth - len(self.matched), 0)]
        return DiskPlan(length, tuple(in_memory), tuple(pages), last, state)


def plan_from_disk(
    index: DiskIndex, chain: PageChain, ids: tuple[int, ...], *, has_state: bool, may_look: bool
) -> DiskPlan | list[CachedFile]:
    """Return the longest restore that needs the disk, or the files whose headers have to be read first.

    It leaves at least one token to compute, and does not end inside an image.

    Args:
        chain: of `ids[:-1]`.
        may_look: headers may be read first. If not, files that are known by name alone are left out.
    """
    deepest = _deepest_state if has_state else _deepest_tokens
    plan, is_cut = deepest(index, chain, ids[:-1], may_look=may_look), False
    while isinstance(plan, DiskPlan) and (start := in_front_of_image(ids, plan.length)) < plan.length:
        plan, is_cut = deepest(index, chain.until(start), ids[:start], may_look=may_look), True
    return replace(plan, is_cut=True) if is_cut and isinstance(plan, DiskPlan) else plan


def may_be_worth_it(ids: Sequence[int], restorable: int) -> bool:
    """Return whether a plan for this prompt could save enough beside the tokens that memory can restore."""
    return len(ids) - 1 >= restorable + _LEAST_GAIN


def is_worth_it(plan: DiskPlan, restorable: int) -> bool:
    """Return whether a plan saves enough beside the tokens that memory can restore."""
    return bool(plan.files) and plan.length >= restorable + _LEAST_GAIN


def _deepest_tokens(
    index: DiskIndex, chain: PageChain, ids: tuple[int, ...], *, may_look: bool
) -> DiskPlan | list[CachedFile]:
    depth = len(chain.keys) - 1
    end = depth * chain.page_size
    rest = ids[end:]
    after = index.after("pages", chain.keys[-1])
    if may_look and (unread := _unread(after)):
        return unread
    best, saved = None, 0
    for file, tokens in _tokens(after):
        length = common_length(tokens, rest)
        if length > saved:
            best, saved = file, length
    return chain.plan(end + saved, depth, best, None)


def _deepest_state(
    index: DiskIndex, chain: PageChain, ids: tuple[int, ...], *, may_look: bool
) -> DiskPlan | list[CachedFile]:
    for depth in range(len(chain.keys) - 1, -1, -1):
        end = depth * chain.page_size
        states = index.after("states", chain.keys[depth])
        if may_look and (unread := _unread(states)):
            return unread
        fitting = [
            (len(tokens), file) for file, tokens in _tokens(states) if tokens == ids[end : end + len(tokens)]
        ]
        if fitting:
            length, state = max(fitting, key=lambda candidate: candidate[0])
            return chain.plan(end + length, depth, None, state)
    return DiskPlan(0, ())


def _unread(files: Sequence[CachedFile]) -> list[CachedFile]:
    """Return those of the files whose content is not known yet, of many the newest."""
    unread = [file for file in files if file.header is None]
    return sorted(unread, key=lambda file: file.used_ns, reverse=True)[:_MOST_READ]


def _tokens(files: Sequence[CachedFile]) -> Iterator[tuple[CachedFile, tuple[int, ...]]]:
    for file in files:
        if file.header:
            yield file, file.header.tokens
