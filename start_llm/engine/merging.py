"""Merge the KV caches of several sequences into one batch, with mlx_lm's cache classes.

Sequences join and leave layer by layer, and each layer is evaluated at once, so at most one layer's KV exists
twice. If a function raises, the caches are unusable.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from start_llm.cache.layers import materialize
from start_llm.cache.leaves import leaves
from start_llm.engine.shifted_cache import shift_merged


def can_merge(caches: Sequence[Any]) -> bool:
    """Return whether every cache has a `merge` method. `engine.self_test` checks that it is correct."""
    return all(hasattr(cache, "merge") for cache in caches)


def merge(sequences: Sequence[list[Any]], shifts: Sequence[int] = ()) -> list[Any]:
    """Merge the caches of several sequences into one batch. Empties the sequences' lists on the way.

    Args:
        shifts: of the sequences' positions; see `engine.shifted_cache`.
    """
    merged: list[Any] = []
    for index in range(len(sequences[0])):
        parts = [sequence[index] for sequence in sequences]
        merged.append(_computed(_merged(parts, shifts)))
        _let_go(sequences, index)
    return merged


def extend(merged: list[Any], sequences: Sequence[list[Any]], shifts: Sequence[int] = ()) -> None:
    """Add sequences to a batch, which is copied once for all of them. Empties their lists on the way."""
    for index, cache in enumerate(merged):
        cache.extend(_merged([sequence[index] for sequence in sequences], shifts))
        _computed(cache)
        _let_go(sequences, index)


def feed(network: Any, sequences: Sequence[list[Any]], chunks: Sequence[Sequence[int]]) -> list[list[Any]]:
    """Compute a chunk for each of several sequences in one forward pass. Empties their lists on the way.

    Shorter chunks are padded after their ends; mlx_lm's caches know how to drop that.

    Args:
        chunks: token ids, at least one for each sequence.

    Returns:
        The caches of each sequence, which hold its chunk too.
    """
    lengths = [len(chunk) for chunk in chunks]
    padding = [max(lengths) - length for length in lengths]
    rows = [[*chunk, *[0] * missing] for chunk, missing in zip(chunks, padding, strict=True)]
    merged = merge(sequences)
    for cache in merged:
        cache.prepare(lengths=lengths, right_padding=padding)
    network(mx.array(rows, dtype=mx.uint32), cache=merged)
    for cache in merged:
        cache.finalize()
    return take_out(merged, range(len(rows)), len(rows))


def grow_by(merged: Sequence[Any], tokens: int) -> None:
    """Set the number of tokens by which merged KV grows; each growth copies all of it."""
    for leaf in leaves(merged):
        if hasattr(leaf, "step"):
            leaf.step = tokens


def copy_of(merged: Sequence[Any], place: int) -> list[Any]:
    """Return lazy copies of the caches of the sequence at `place`."""
    return [cache.extract(place) for cache in merged]


def take_out(merged: list[Any], places: Sequence[int], sequences: int) -> list[list[Any]]:
    """Remove the sequences at `places` from a batch of `sequences`, and return the caches of each.

    The batch is copied once for all of them. If none remains, it is emptied on the way.
    """
    taken: list[list[Any]] = [[] for _ in places]
    staying = [place for place in range(sequences) if place not in places]
    for index, cache in enumerate(merged):
        parts = [cache.extract(place) for place in places]
        if staying:
            cache.filter(staying)
        else:
            merged[index] = None
        # mlx_lm removes padding with a slice, which would keep the wider array alive (lesson 26).
        materialize([*parts, cache] if staying else parts)
        for caches, part in zip(taken, parts, strict=True):
            caches.append(part)
    return taken


def _merged(parts: Sequence[Any], shifts: Sequence[int]) -> Any:
    merged = type(parts[0]).merge(parts)
    shift_merged([merged], shifts)
    return merged


def _computed(cache: Any) -> Any:
    mx.eval(cache.state)
    return cache


def _let_go(sequences: Sequence[list[Any]], index: int) -> None:
    for sequence in sequences:
        sequence[index] = None
