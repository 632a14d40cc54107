"""MLX's memory, as tests look at it."""

from __future__ import annotations

import gc

import mlx.core as mx


def active_bytes() -> int:
    """What is in use once nobody holds garbage."""
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


def rounded_up_bytes() -> int:
    """What the allocator adds to an array, at most: CUDA's gives whole blocks of 16 KiB."""
    before, size = active_bytes(), 20_001
    array = mx.zeros(size, mx.uint8)
    mx.eval(array)
    return mx.get_active_memory() - before - size
