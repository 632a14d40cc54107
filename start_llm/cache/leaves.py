"""Find the leaves of a network's caches. `cache.kinds` has the table of what each class of leaf allows."""

from collections.abc import Iterator, Sequence
from typing import Any

from start_llm.cache.kinds import NonTrimmableLeaf, TrimmableLeaf, reuse_of


def leaves(caches: Sequence[Any]) -> Iterator[Any]:
    """Yield all leaves: the caches, with composite ones replaced by what they hold."""
    for cache in caches:
        if type(cache).__name__ == "CacheList":
            yield from leaves(cache.caches)
        else:
            yield cache


def trimmable_leaves(caches: Sequence[Any]) -> list[tuple[Any, TrimmableLeaf]]:
    """Return the leaves that keep KV for every token, each with how it is read and restored."""
    return [(leaf, reuse) for leaf in leaves(caches) if isinstance(reuse := reuse_of(leaf), TrimmableLeaf)]


def filled_leaves(caches: Sequence[Any]) -> list[tuple[Any, TrimmableLeaf]]:
    """Return the trimmable leaves that hold arrays."""
    return [(leaf, kind) for leaf, kind in trimmable_leaves(caches) if not leaf.empty()]


def non_trimmable_leaves(caches: Sequence[Any]) -> list[tuple[Any, NonTrimmableLeaf]]:
    """Return the leaves whose state can only be copied, each with how it is read and restored."""
    return [(leaf, reuse) for leaf in leaves(caches) if isinstance(reuse := reuse_of(leaf), NonTrimmableLeaf)]
