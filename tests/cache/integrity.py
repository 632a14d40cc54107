"""Check the invariants between pages, sequence caches and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from start_llm.cache.arrays import KVPieces
from start_llm.cache.kinds import TrimmableLeaf, reuse_of
from start_llm.cache.layers import Layers
from start_llm.cache.leaves import leaves
from start_llm.cache.page_store import PageStore
from start_llm.cache.pages import Checkpoint, MemoryUsage, Page, PageRun, PageTree, SequenceCache, page_key
from start_llm.cache.prompt_cache import PromptCache
from tests.cache.fakes import FakeLayers, FakePieces

_LONGEST_CHAIN = 100
"""Limit for the search through keys that were rehashed because of collisions."""


class BrokenInvariant(AssertionError):
    """The cache contradicts itself. Always a bug, never caused by input."""


def check_cache(cache: PromptCache) -> None:
    """Check everything.

    Raises:
        BrokenInvariant: at the first contradiction.
    """
    check_store(cache._store)


def check_store(store: PageStore) -> None:
    check_tree(store.tree, store.seq_caches, list(store.checkpoints))
    idle = [item for item in store.seq_caches if not item.is_active]
    pages = {id(item.page): item.page for item in store.checkpoints}
    for usage, parts in (
        (store.idle_usage, [store.usage_of(item) for item in idle]),
        (store.checkpoints.usage, [checkpoint_usage(page) for page in pages.values()]),
    ):
        total = sum(parts, MemoryUsage())
        _demand(usage == total, f"{usage} is counted where {total} is")
    for seq_cache in idle:
        length = length_of(store.layers, seq_cache.caches)
        _demand(
            length in (None, len(seq_cache.tokens)),
            f"a sequence cache of {len(seq_cache.tokens)} tokens holds {length}",
        )


def checkpoint_usage(page: Page) -> MemoryUsage:
    """Return the memory of a page's checkpoints. A tail that several of them share counts once."""
    cuts = (checkpoint.tail_cut for checkpoint in page.checkpoints)
    tails = {id(cut): cut for cut in cuts if cut is not None}
    parts = [*(checkpoint.state for checkpoint in page.checkpoints), *tails.values()]
    return sum((MemoryUsage(part.nbytes, part.arrays) for part in parts), MemoryUsage())


def length_of(layers: Layers, caches: Sequence[Any]) -> int | None:
    """Return the number of tokens in the trimmable leaves; None if there are none or they disagree.

    Empty leaves are ignored if others are filled: they belong to layers without attention.
    """
    if isinstance(layers, FakeLayers):
        return layers.length(caches)
    sliced = [leaf for leaf in leaves(caches) if isinstance(reuse_of(leaf), TrimmableLeaf)]
    offsets = {int(leaf.offset) for leaf in sliced if not leaf.empty()} or {0 for _ in sliced}
    return offsets.pop() if len(offsets) == 1 else None


def covers(stored: KVPieces | FakePieces, start: int, end: int) -> bool:
    """Return whether every leaf has all tokens between these positions, but for one that was always empty."""
    if isinstance(stored, FakePieces):
        return stored.covers(start, end)
    filled = zip(stored._leaves, stored._token_bytes, strict=True)
    return all(_has_all(pieces, start, end) for pieces, token_bytes in filled if token_bytes)


def _has_all(pieces: Sequence[Any], start: int, end: int) -> bool:
    reached = start
    for piece in pieces:
        if piece.start <= reached:
            reached = max(reached, piece.end)
    return reached >= end


def check_tree(
    tree: PageTree, seq_caches: Sequence[SequenceCache], checkpoints: Sequence[Checkpoint]
) -> None:
    pages = list(tree.pages())
    _demand(len(pages) == tree.count, "pages are counted wrongly")
    for page in pages:
        _check_page(page, seq_caches, tree.page_size)
    everywhere = [*pages, *tree._roots.values()]
    _demand(
        _same([item for page in everywhere for item in page.checkpoints], checkpoints),
        "a checkpoint is listed in one place only",
    )
    _demand(
        _same([item for page in everywhere for item in page.seq_caches], seq_caches),
        "a sequence cache is listed in one place only",
    )
    for seq_cache in seq_caches:
        _check_seq_cache(seq_cache, tree.page_size)
    for checkpoint in checkpoints:
        _check_checkpoint(checkpoint, tree.page_size)
    _check_runs(tree, pages)


def _same(left: Sequence[object], right: Sequence[object]) -> bool:
    return sorted(map(id, left)) == sorted(map(id, right))


def _check_runs(tree: PageTree, pages: Sequence[Page]) -> None:
    runs: dict[PageRun, list[Page]] = {}
    for page in sorted(pages, key=lambda member: member.end):
        if isinstance(page.holder, PageRun):
            runs.setdefault(page.holder, []).append(page)
    _demand(_same(list(tree._runs), list(runs)), "a run is not counted, or one without pages is")
    usage = sum((MemoryUsage(run.stored.nbytes, run.stored.arrays) for run in runs), MemoryUsage())
    _demand(usage == tree.runs_usage, "memory of runs is counted wrongly")
    for run, inside in runs.items():
        _demand(list(run.pages.items()) == [(page.end, page) for page in inside], "a run has other pages")
        _demand(covers(run.stored, *run.span), "a run does not hold its pages")
    _demand(
        sum(run.unused_run_bytes for run in runs) == tree.unused_run_bytes, "what is loose is counted wrongly"
    )


def _check_page(page: Page, seq_caches: Sequence[SequenceCache], page_size: int) -> None:
    parent = page.parent
    _demand(parent is not None and parent.children.get(page.key) is page, "a page is not its parent's child")
    if parent is not None:
        _demand(_has_its_key(page, parent), "a page has the key of other tokens")
        _demand(page.start == parent.end, "a page does not begin where its parent ends")
    _demand(
        _same(list(page.by_tokens), list(page.children.values())),
        "children are listed twice, and differently",
    )
    is_full = len(page.tokens) == page_size
    _demand(is_full or not page.children, "a short page has children")
    _demand(page.holder is not None or not page.has_nothing_after, "a lost page is kept for nothing")
    if isinstance(page.holder, SequenceCache):
        seq_cache = page.holder
        _demand(any(item is seq_cache for item in seq_caches), "a page lies in a sequence cache that is gone")
        _demand(
            any(item is page for item in seq_cache.path),
            "a page lies in a sequence cache that does not know it",
        )


def _has_its_key(page: Page, parent: Page) -> bool:
    """Return whether the key is the hash of the tokens, or rehashed from it after a collision."""
    key = page_key(parent.key, page.tokens)
    for _ in range(_LONGEST_CHAIN):
        if key == page.key:
            return True
        key = page_key(key, page.tokens)
    return False


def _check_seq_cache(seq_cache: SequenceCache, page_size: int) -> None:
    parent = seq_cache.root
    for page in seq_cache.path:
        _demand(page.parent is parent, "a sequence cache's path has a gap")
        _demand(page.holder is not None, "a page of a sequence cache is lost")
        _demand(isinstance(page.holder, SequenceCache), "a page of a sequence cache is kept beside it")
        _demand(
            tuple(seq_cache.tokens[page.start : page.end]) == page.tokens, "a sequence cache has other tokens"
        )
        parent = page
    left = len(seq_cache.tokens) - seq_cache.end_page.end
    _demand(0 <= left < page_size, "a sequence cache's path is too long, or too short")
    _demand(
        any(item is seq_cache for item in seq_cache.end_page.seq_caches),
        "a sequence cache does not stand at its end",
    )


def _check_checkpoint(checkpoint: Checkpoint, page_size: int) -> None:
    _demand(len(checkpoint.tail) < page_size, "a checkpoint hangs on the wrong page")
    _demand((checkpoint.tail_cut is not None) == bool(checkpoint.tail), "a checkpoint misses its tail")


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise BrokenInvariant(otherwise)
