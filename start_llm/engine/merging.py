"""Caches of several sequences as one batch, through mlx_lm's cache classes.

Everything is done one cache after the other, and computed at once: while rows join or leave, one layer's KV
is there twice, and no more. What fails half way leaves caches that nobody can use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from start_llm.cache.layers import leaves, settle


def can_merge(caches: Sequence[Any]) -> bool:
    """Whether these classes say that they can. `engine.self_test` finds out."""
    return all(hasattr(cache, "merge") for cache in caches)


def merge(rows: Sequence[list[Any]]) -> list[Any]:
    """The caches of several rows as one batch. Those of the rows are emptied on the way."""
    merged: list[Any] = []
    for index in range(len(rows[0])):
        parts = [row[index] for row in rows]
        merged.append(_computed(type(parts[0]).merge(parts)))
        _let_go(rows, index)
    return merged


def extend(merged: list[Any], row: list[Any]) -> None:
    """Add a row, whose caches are emptied on the way."""
    for index, cache in enumerate(merged):
        cache.extend(type(row[index]).merge([row[index]]))
        _computed(cache)
        _let_go([row], index)


def grow_by(merged: Sequence[Any], tokens: int) -> None:
    """Let merged KV grow by so many tokens when it has to: each time all of it is copied."""
    for leaf in leaves(merged):
        if hasattr(leaf, "step"):
            leaf.step = tokens


def copy_of(merged: Sequence[Any], place: int) -> list[Any]:
    """The caches of one row, not computed yet."""
    return [cache.extract(place) for cache in merged]


def take_out(merged: list[Any], place: int, rows: int) -> list[Any]:
    """The caches of one row of so many, which leaves the batch. It must not be the last one."""
    taken: list[Any] = []
    for cache in merged:
        row = cache.extract(place)
        cache.filter([other for other in range(rows) if other != place])
        # mlx_lm takes padding away by a slice, which would keep the wider array (lesson 26).
        settle([row, cache])
        taken.append(row)
    return taken


def unmerge(merged: list[Any]) -> None:
    """Give the one row that is left in a batch caches of its own."""
    for index, cache in enumerate(merged):
        row = cache.extract(0)
        settle([row])
        merged[index] = row


def _computed(cache: Any) -> Any:
    mx.eval(cache.state)
    return cache


def _let_go(rows: Sequence[list[Any]], index: int) -> None:
    for row in rows:
        row[index] = None
