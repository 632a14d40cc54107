"""Caches whose next token stands at another position than their length says.

mlx_lm's networks read the position of a token from the `offset` of its cache, and nothing else, so text
after images runs in the very same network: only what it reads as `offset` is moved. What is stored, shared
and written to disk are plain caches, which know nothing of this.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from start_llm.cache.leaves import leaves


class ShiftedCache:
    """Stands in front of a plain cache while a network reads it.

    Args:
        shift: positions from the cache's length to the position of its next token.
    """

    def __init__(self, cache: Any, shift: int) -> None:
        self._cache = cache
        self._shift = shift

    @property
    def offset(self) -> int:
        return int(self._cache.offset) + self._shift

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self._cache.update_and_fetch(keys, values)

    def make_mask(self, *args: Any, **options: Any) -> Any:
        return self._cache.make_mask(*args, **options)


def shifted(caches: list[Any], shift: int) -> list[Any]:
    """Return what a network has to be given for these caches of one sequence: without a shift, the caches."""
    if not shift:
        return caches
    return [ShiftedCache(cache, shift) if type(cache).__name__ == "KVCache" else cache for cache in caches]


def shift_merged(merged: Sequence[Any], shifts: Sequence[int]) -> None:
    """Move the positions of merged caches, by one shift for each sequence."""
    if any(shifts):
        moved = mx.array(list(shifts))
        for leaf in leaves(merged):
            if type(leaf).__name__ == "BatchKVCache":
                leaf.offset = leaf.offset + moved
