"""The classes of cache that mlx_lm's networks have, one row each.

A row says what the class is called in the words of the field, how its arrays are taken out and put back, and
what its memory grows with. A class without a row can be run, but nothing of it can be used again.

Leaves of a network's caches are of two sorts: *sliced* ones keep something for every token, which can be cut
into pages and cut back to any length; *whole* ones keep a state that is only right at the position it was
reached at, and can only be copied there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

type Arrays = tuple[Any, ...]
"""Arrays of one leaf."""


@dataclass(frozen=True, slots=True)
class Sliced:
    """A leaf that keeps something for every token; axis -2 of each array counts tokens."""

    arrays: Callable[[Any], Arrays]
    fill: Callable[[Any, Arrays], None]


@dataclass(frozen=True, slots=True)
class Whole:
    """A leaf that can only be copied: its arrays, and the numbers that say what they mean."""

    arrays: Callable[[Any], Arrays]
    numbers: Callable[[Any], tuple[int, ...]]
    fill: Callable[[Any, Arrays, tuple[int, ...]], None]


@dataclass(frozen=True, slots=True)
class Growth:
    """What one leaf costs, in bytes.

    Attributes:
        token_bytes: of each token, for good.
        window, window_bytes: how many of the last tokens it keeps, and of each of these.
        state_bytes: whatever the length.
    """

    token_bytes: int = 0
    window: int = 0
    window_bytes: int = 0
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Kind:
    """One class of cache.

    Attributes:
        words: what the start-up summary calls a layer that has one.
        reuse: how it is taken out and put back; None if it cannot be, or only its parts can.
        growth: its cost, read off a leaf that holds some tokens; None for what only holds other leaves.
        put_state: for classes whose `state` cannot be set.
    """

    words: str
    reuse: Sliced | Whole | None = None
    growth: Callable[[Any], Growth] | None = None
    put_state: Callable[[Any, Any], None] | None = None


# ------------------------------------------------------------------------------------- taken out and put back


def _plain(cache: Any) -> Arrays:
    """None, if the layer of this cache does not attend (Nemotron NAS has linear ones in its place)."""
    return () if cache.keys is None else (cache.keys, cache.values)


def _fill_plain(cache: Any, arrays: Arrays) -> None:
    cache.keys, cache.values = arrays or (None, None)


def _fill_quantised(cache: Any, arrays: Arrays) -> None:
    cache.keys, cache.values = list(arrays[:3]), list(arrays[3:])


def _in_order(cache: Any) -> Arrays:
    """The last tokens of the window, oldest first. A long prefill chunk leaves more than a window behind."""
    keys, values = cache._temporal_order(cache.keys), cache._temporal_order(cache.values)
    return keys[..., -cache.max_size :, :], values[..., -cache.max_size :, :]


def _fill_rotating(cache: Any, arrays: Arrays, numbers: tuple[int, ...]) -> None:
    cache.keys, cache.values = arrays
    (cache.offset,) = numbers
    cache._idx = cache.keys.shape[2]


def _chunk(cache: Any) -> Arrays:
    end = cache.offset - cache.start_position
    return cache.keys[..., :end, :], cache.values[..., :end, :]


def _fill_chunked(cache: Any, arrays: Arrays, numbers: tuple[int, ...]) -> None:
    cache.keys, cache.values = arrays
    cache.offset, cache.start_position = numbers


def _fill_recurrent(cache: Any, arrays: Arrays, numbers: tuple[int, ...]) -> None:  # noqa: ARG001 - it has none
    cache.cache = list(arrays)


_COMPRESSED_FIELDS = ("window", "compress_kv", "index_k", "pending_kv", "pending_gate")
"""Of mlx_lm.models.deepseek_v41.LayerCache, in the order of its `state`, which ends with the offset."""


def _compressed(cache: Any) -> Arrays:
    """Those that there are: which ones depends on the layer, and on how many tokens there were."""
    return tuple(array for name in _COMPRESSED_FIELDS if (array := getattr(cache, name)) is not None)


def _compressed_numbers(cache: Any) -> tuple[int, ...]:
    """How many tokens, and the places of the fields that there are."""
    present = (at for at, name in enumerate(_COMPRESSED_FIELDS) if getattr(cache, name) is not None)
    return (int(cache.offset), *present)


def _fill_compressed(cache: Any, arrays: Arrays, numbers: tuple[int, ...]) -> None:
    cache.offset, *places = numbers
    given = dict(zip(places, arrays, strict=True))
    for at, name in enumerate(_COMPRESSED_FIELDS):
        setattr(cache, name, given.get(at))


def _put_compressed(cache: Any, state: Any) -> None:
    *values, offset = state
    for name, value in zip(_COMPRESSED_FIELDS, values, strict=True):
        setattr(cache, name, value)
    cache.offset = int(offset)


# ----------------------------------------------------------------------------------------------------- growth


def _each_token(leaf: Any) -> Growth:
    return Growth(token_bytes=_bytes_of_one(_flat(leaf.keys, leaf.values)))


def _last_tokens(window: str) -> Callable[[Any], Growth]:
    """Of a leaf that keeps as many tokens as this attribute says."""

    def growth(leaf: Any) -> Growth:
        return Growth(
            window=int(getattr(leaf, window)), window_bytes=_bytes_of_one(_flat(leaf.keys, leaf.values))
        )

    return growth


def _no_growth(leaf: Any) -> Growth:
    return Growth(state_bytes=int(leaf.nbytes))


def _compressed_growth(leaf: Any) -> Growth:
    """A window of tokens, one entry for each group of them for good, and the rows of the open group."""
    kept = [array for array in (leaf.compress_kv, leaf.index_k) if array is not None]
    pending = [array for array in (leaf.pending_kv, leaf.pending_gate) if array is not None]
    group = -(-leaf.offset // kept[0].shape[1]) if kept else 0
    return Growth(
        token_bytes=-(-sum(array.nbytes for array in kept) // leaf.offset),
        window=int(leaf.window_size),
        window_bytes=_bytes_of_one([leaf.window]),
        state_bytes=group * sum(array.shape[-1] * array.itemsize for array in pending),
    )


def _bytes_of_one(arrays: Iterable[Any]) -> int:
    """Of one token: the next to last axis counts tokens, and room for later ones is not counted."""
    return sum(array.nbytes // array.shape[-2] for array in arrays)


def _flat(*values: Any) -> Iterable[Any]:
    """Quantised keys and values are three arrays each; a layer that does not attend has none."""
    for value in values:
        if value is not None:
            yield from value if isinstance(value, list | tuple) else (value,)


# ------------------------------------------------------------------------------------------------------ table

KINDS = {
    "KVCache": Kind(
        words="full attention",
        reuse=Sliced(_plain, _fill_plain),
        growth=_each_token,
    ),
    "QuantizedKVCache": Kind(
        words="quantised attention",
        reuse=Sliced(lambda cache: (*cache.keys, *cache.values), _fill_quantised),
        growth=_each_token,
    ),
    "RotatingKVCache": Kind(
        words="sliding window",
        reuse=Whole(_in_order, lambda cache: (cache.offset,), _fill_rotating),
        growth=_last_tokens("max_size"),
    ),
    "ChunkedKVCache": Kind(
        words="chunked attention",
        reuse=Whole(_chunk, lambda cache: (cache.offset, cache.start_position), _fill_chunked),
        growth=_last_tokens("chunk_size"),
    ),
    "ArraysCache": Kind(
        words="recurrent state",
        reuse=Whole(lambda cache: tuple(cache.cache), lambda _: (), _fill_recurrent),
        growth=_no_growth,
    ),
    "LayerCache": Kind(
        words="compressed attention",
        reuse=Whole(_compressed, _compressed_numbers, _fill_compressed),
        growth=_compressed_growth,
        put_state=_put_compressed,
    ),
    "CacheList": Kind(words="composite"),
}


def reuse_of(leaf: Any) -> Sliced | Whole | None:
    """How a leaf is taken out and put back. A window that keeps its first tokens for good cannot be."""
    kind = KINDS.get(type(leaf).__name__)
    return kind.reuse if kind and not getattr(leaf, "keep", 0) else None


def growth_of(leaf: Any) -> Growth | None:
    """What a leaf that holds some tokens costs; None if no row knows."""
    kind = KINDS.get(type(leaf).__name__)
    return kind.growth(leaf) if kind and kind.growth else None


def words_of(cache: Any) -> str:
    """What a layer with this cache is called; without a row, by its class."""
    name = type(cache).__name__
    return KINDS[name].words if name in KINDS else name


def put_state(leaf: Any, state: Any) -> None:
    """Give a leaf a state of the form that it tells its own in."""
    kind = KINDS.get(type(leaf).__name__)
    if kind and kind.put_state:
        kind.put_state(leaf, state)
    else:
        leaf.state = state
