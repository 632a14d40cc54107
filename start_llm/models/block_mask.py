"""A cache in which the tokens of a chunk see each other in both directions.

Gemma 4 reads its images so. mlx_vlm's network has such a mask for a whole prompt only, and is silently causal
behind a cached prefix. A network asks its caches for masks, so the cache gives the right one.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx


class BlockMaskCache:
    """Stands in front of one of mlx_lm's caches for a chunk that is one image."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    @property
    def offset(self) -> int:
        return int(self._cache.offset)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self._cache.update_and_fetch(keys, values)

    def make_mask(self, tokens: int, **options: Any) -> mx.array | None:
        """Return [tokens, tokens in sight]: causal for those before the chunk, and everything within it."""
        if tokens == 1:
            return self._cache.make_mask(tokens, **options)
        mask = self._cache.make_mask(tokens, **options | {"return_array": True})
        in_sight = mask.shape[-1]
        return mask | (mx.arange(in_sight) >= in_sight - tokens)
