"""The cache classes of mlx_lm's networks: one table entry for each.

An entry gives the class's usual name, how its arrays are read and restored, and how its memory grows. A
network with a class that has no entry runs without prompt caching.

The *leaves* of a network's caches are the caches themselves, without the composite ones. A *trimmable* leaf
keeps KV for every token, which can be cut into pages and trimmed to any length. A *non-trimmable* leaf keeps
a state that is valid only at the position where it was reached, and can only be copied there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from start_llm.cache.arrays import Arrays, LeafState


@dataclass(frozen=True, slots=True)
class TrimmableLeaf:
    """A leaf that keeps KV for every token; axis -2 of each array is the token axis."""

    arrays: Callable[[Any], Arrays]
    fill: Callable[[Any, Arrays], None]


@dataclass(frozen=True, slots=True)
class NonTrimmableLeaf:
    """A leaf that can only be copied: its arrays, and the numbers that they need to be restored.

    Attributes:
        rewinding: how a copy is taken back to an earlier position; None if it cannot be.
    """

    arrays: Callable[[Any], Arrays]
    numbers: Callable[[Any], tuple[int, ...]]
    fill: Callable[[Any, Arrays, tuple[int, ...]], None]
    rewinding: Rewinding | None = None


@dataclass(frozen=True, slots=True)
class Rewinding:
    """How a copy of a leaf with a window is taken back to an earlier position, from tokens before the window.

    Attributes:
        window: returns the tokens that the leaf needs.
        longer: returns its arrays, with so many tokens before the window as it still has.
        rewound: returns arrays and numbers, taken back by so many tokens, with as many before the window as
            the last argument says, if there are.
    """

    window: Callable[[Any], int]
    longer: Callable[[Any, int], Arrays]
    rewound: Callable[[Any, Arrays, tuple[int, ...], int, int], LeafState]


@dataclass(frozen=True, slots=True)
class Growth:
    """The memory of one leaf, in bytes.

    Attributes:
        token_bytes: for each token.
        window, window_bytes: number of most recent tokens that it keeps, and bytes for each of these.
        state_bytes: independent of the length.
    """

    token_bytes: int = 0
    window: int = 0
    window_bytes: int = 0
    state_bytes: int = 0


def _put_state(leaf: Any, state: Any) -> None:
    leaf.state = state


@dataclass(frozen=True, slots=True)
class CacheKind:
    """One cache class.

    Attributes:
        words: name of such a layer in the start-up summary.
        attention: name of such a layer in `/stats`.
        reuse: how it is read and restored; None if it cannot be, or only its parts can.
        growth: returns its cost, from a leaf that holds some tokens; None if the class is unknown or a
            composite.
        growth_tokens: tokens that a leaf has to hold for that; 0 if there is no `growth`.
        put_state: sets a leaf's state, in the form of its `state` property.
        changed: names of the attributes that a forward pass changes. An array of KV for every token is none
            of them: what is after `offset` does not count.
    """

    words: str
    attention: str
    reuse: TrimmableLeaf | NonTrimmableLeaf | None = None
    growth: Callable[[Any], Growth] | None = None
    growth_tokens: int = 0
    put_state: Callable[[Any, Any], None] = _put_state
    changed: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------------ read and restored


def _plain(cache: Any) -> Arrays:
    """Return keys and values; () for a layer without attention (Nemotron NAS has linear layers there)."""
    return () if cache.keys is None else (cache.keys, cache.values)


def _fill_plain(cache: Any, arrays: Arrays) -> None:
    cache.keys, cache.values = arrays or (None, None)


def _in_order(cache: Any, more: int = 0) -> Arrays:
    """Return the tokens of the window, oldest first, and `more` before it.

    A long prefill chunk leaves more than a window.
    """
    most = cache.max_size + more
    keys, values = cache._temporal_order(cache.keys), cache._temporal_order(cache.values)
    return keys[..., -most:, :], values[..., -most:, :]


def _fill_rotating(cache: Any, arrays: Arrays, numbers: tuple[int, ...]) -> None:
    (cache.keys, cache.values), (cache.offset,) = _back_in_window(cache, arrays, numbers)
    cache._idx = cache.keys.shape[2]


def _back_in_window(
    cache: Any, arrays: Arrays, numbers: tuple[int, ...], tokens: int = 0, more: int = 0
) -> LeafState:
    """Return the arrays of a window as it was `tokens` tokens before, and at most `more` before it."""
    length = arrays[0].shape[-2]
    end = length - tokens
    start = max(end - cache.max_size - more, 0)
    if (start, end) == (0, length):
        return arrays, numbers
    return tuple(array[..., start:end, :] for array in arrays), (numbers[0] - tokens,)


def _chunk(cache: Any) -> Arrays:
    end = cache.offset - cache.start_position
    return cache.keys[..., :end, :], cache.values[..., :end, :]


def _fill_chunked(cache: Any, arrays: Arrays, numbers: tuple[int, ...]) -> None:
    cache.keys, cache.values = arrays
    cache.offset, cache.start_position = numbers


def _fill_recurrent(cache: Any, arrays: Arrays, numbers: tuple[int, ...]) -> None:  # noqa: ARG001 - it has none
    cache.cache = list(arrays)


_COMPRESSED_FIELDS = ("window", "compress_kv", "index_k", "pending_kv", "pending_gate")
"""Fields of mlx_lm.models.deepseek_v41.LayerCache in the order of its `state`, which ends with the offset."""


def _compressed(cache: Any) -> Arrays:
    """Return the fields that are set, which depends on the layer and on the number of tokens."""
    return tuple(array for name in _COMPRESSED_FIELDS if (array := getattr(cache, name)) is not None)


def _compressed_numbers(cache: Any) -> tuple[int, ...]:
    """Return the offset and the indices of the fields that are set."""
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
    return Growth(token_bytes=_bytes_of_one(_plain(leaf)))


def _last_tokens(window: str) -> Callable[[Any], Growth]:
    """Return a growth function for a leaf that keeps as many tokens as this attribute says."""

    def growth(leaf: Any) -> Growth:
        return Growth(window=int(getattr(leaf, window)), window_bytes=_bytes_of_one(_plain(leaf)))

    return growth


def _no_growth(leaf: Any) -> Growth:
    return Growth(state_bytes=int(leaf.nbytes))


def _compressed_growth(leaf: Any) -> Growth:
    """Growth of a window, of one permanent entry for each group of tokens, and of the open group's tokens."""
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
    """Return the bytes of one token. Axis -2 is the token axis; room for later tokens is not counted."""
    return sum(array.nbytes // array.shape[-2] for array in arrays)


# ------------------------------------------------------------------------------------------------------ table

KINDS = {
    "KVCache": CacheKind(
        words="full attention",
        attention="global",
        reuse=TrimmableLeaf(_plain, _fill_plain),
        growth=_each_token,
        growth_tokens=1,
        changed=("offset",),
    ),
    "RotatingKVCache": CacheKind(
        words="sliding window",
        attention="sliding_window",
        reuse=NonTrimmableLeaf(
            _in_order,
            lambda cache: (cache.offset,),
            _fill_rotating,
            Rewinding(lambda cache: int(cache.max_size), _in_order, _back_in_window),
        ),
        growth=_last_tokens("max_size"),
        growth_tokens=1,
        changed=("keys", "values", "offset", "_idx"),
    ),
    "ChunkedKVCache": CacheKind(
        words="chunked attention",
        attention="chunked",
        reuse=NonTrimmableLeaf(_chunk, lambda cache: (cache.offset, cache.start_position), _fill_chunked),
        growth=_last_tokens("chunk_size"),
        growth_tokens=1,
        changed=("keys", "values", "offset", "start_position"),
    ),
    "ArraysCache": CacheKind(
        words="recurrent state",
        attention="recurrent",
        reuse=NonTrimmableLeaf(lambda cache: tuple(cache.cache), lambda _: (), _fill_recurrent),
        growth=_no_growth,
        growth_tokens=1,
        changed=("cache", "left_padding", "lengths"),
    ),
    "LayerCache": CacheKind(
        words="compressed attention",
        attention="compressed",
        reuse=NonTrimmableLeaf(_compressed, _compressed_numbers, _fill_compressed),
        growth=_compressed_growth,
        growth_tokens=320,
        put_state=_put_compressed,
        changed=(*_COMPRESSED_FIELDS, "offset"),
    ),
    "CacheList": CacheKind(words="composite", attention="composite"),
}


def kind_of(cache: Any) -> CacheKind:
    """Return the entry of a cache's class. One without an entry has its own name, and nothing else."""
    name = type(cache).__name__
    return KINDS.get(name) or CacheKind(words=name, attention=name)


def reuse_of(leaf: Any) -> TrimmableLeaf | NonTrimmableLeaf | None:
    """Return how a leaf is read and restored; None if its class has no entry.

    Also None for a window that always keeps its first tokens.
    """
    return None if getattr(leaf, "keep", 0) else kind_of(leaf).reuse


def growth_of(leaf: Any) -> Growth | None:
    """Return the cost of a leaf that holds some tokens; None if its class has no entry."""
    growth = kind_of(leaf).growth
    return growth(leaf) if growth else None


def label_of(cache: Any) -> str:
    """Return the name of a layer with this cache; its class name if it has no entry."""
    return kind_of(cache).words
