"""How much memory should be given back, as the machine and MLX see it."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx


def shortage(budget_bytes: int, lacking_bytes: Callable[[], int]) -> int:
    """Bytes beyond the budget, or that others on this machine lack; 0 if all is well.

    What MLX holds for later use goes first: then nothing that is kept has to go for it.

    Args:
        lacking_bytes: what others lack; see `models.device`.
    """
    missing = _missing(budget_bytes, lacking_bytes)
    if missing and mx.get_cache_memory():
        mx.clear_cache()
        missing = _missing(budget_bytes, lacking_bytes)
    return missing


def _missing(budget_bytes: int, lacking_bytes: Callable[[], int]) -> int:
    ours = mx.get_active_memory() + mx.get_cache_memory() - budget_bytes
    return max(ours, lacking_bytes(), 0)
