"""Measure at start-up the memory and the time that prefill chunks take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from start_llm.cache.layers import Layers, leaves
from start_llm.engine.pacing import LONGEST_CHUNK, Chunk
from start_llm.models.vision import Vision
from start_llm.models.vision_families import blank

_SHORT, _LONGER, _LONG, _BEHIND = 64, 128, 512, 16
"""Tokens of the measured chunks; `_BEHIND` short chunks are put before the later ones."""
_PATIENCE_S = 2.0
"""Predicted seconds up to which the long chunk is tried. It tells more of what a mixture of experts takes."""
_SHORTEST = 16
_SIDES = (224, 448)
"""Pixels of the sides of the images that the tower is tried on: 49 and 196 tokens of a Qwen3-VL."""
_MOST_TOKENS = 2**20


@dataclass(frozen=True, slots=True)
class PrefillMemoryCost:
    """Bytes for a chunk of L tokens after n others, without what it adds to the caches.

    They are L (token + pair n) + before n.

    Attributes:
        token_bytes: activations per token.
        pair_bytes: attention scores per token and token before it, for all heads, if attention is not fused.
        before_bytes: per token before the chunk, which MLA decompresses.
    """

    token_bytes: float
    pair_bytes: float = 0.0
    before_bytes: float = 0.0

    def bytes_of(self, tokens: int, before: int) -> int:
        return int(tokens * (self.token_bytes + self.pair_bytes * before) + self.before_bytes * before)

    def longest(self, nbytes: int, before: int) -> int:
        """Return the longest chunk, in tokens, that takes at most `nbytes`, but at least 16."""
        left = nbytes - self.before_bytes * before
        each = max(self.token_bytes + self.pair_bytes * before, 1.0)
        return min(max(int(left / each), _SHORTEST), LONGEST_CHUNK)


@dataclass(frozen=True, slots=True)
class PrefillProfile:
    """The measured cost of prefill chunks.

    Attributes:
        cost: in memory.
        chunks: in time.
    """

    cost: PrefillMemoryCost
    chunks: tuple[Chunk, ...]


def measure_work(
    network: Any, layers: Layers, clock: Callable[[], float] = time.perf_counter
) -> PrefillProfile:
    """Compute short chunks with few and with many tokens before them, and return what they cost.

    The tokens before are one short chunk's KV, repeated: only their number matters, not their values.

    Args:
        clock: seconds.
    """
    probe = _Probe(network, clock)
    near = layers.fresh()
    probe.compute(near, _SHORT, 0)
    short = probe.compute(near, _SHORT, _SHORT)
    far, before = near, 2 * _SHORT
    if layers.has_trimmable and not layers.unknown:
        far, before = _repeated(layers, near), _BEHIND * _SHORT
    probe.compute(far, _SHORT, before)
    after = probe.compute(far, _SHORT, before + _SHORT)
    longer = probe.compute(far, _LONGER, before + 2 * _SHORT)
    tried = [short, after, longer]
    if _seconds_of_a_long_one(after.chunk, longer.chunk) <= _PATIENCE_S:
        tried.append(probe.compute(far, _LONG, before + 2 * _SHORT + _LONGER))
    return PrefillProfile(_cost_of(short, after, longer), tuple(one.chunk for one in tried))


@dataclass(frozen=True, slots=True)
class TowerMemoryCost:
    """Bytes that the vision tower takes for one image of T tokens: T (token + pair T).

    Attributes:
        token_bytes: pixels and activations per token.
        pair_bytes: attention scores per pair of tokens, if attention is not fused.
        most_tokens: no image has more.
    """

    token_bytes: float = 0.0
    pair_bytes: float = 0.0
    most_tokens: int = _MOST_TOKENS

    def bytes_of(self, tokens: int) -> int:
        tokens = min(tokens, self.most_tokens)
        return int(tokens * (self.token_bytes + self.pair_bytes * tokens))

    def longest(self, nbytes: int) -> int:
        """Return the most tokens of an image for which the tower takes at most `nbytes`, but at least 16."""
        low, high = _SHORTEST, _MOST_TOKENS
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.bytes_of(middle) <= nbytes else (low, middle - 1)
        return low


def measure_tower(vision: Vision) -> TowerMemoryCost:
    """Let the vision tower look at two blank images, and return what it costs."""
    (small, less), (large, more) = [_looked(vision, side) for side in _SIDES]
    if large == small:
        return TowerMemoryCost(more / large, most_tokens=large)
    pair = max(more / large - less / small, 0.0) / (large - small)
    return TowerMemoryCost(max(more / large - pair * large, 0.0), pair)


def _looked(vision: Vision, side: int) -> tuple[int, int]:
    """Look at a square image, and return the number of its tokens and the bytes that this took."""
    done = vision.processor.preprocess(blank((side, side)))
    mx.clear_cache()
    active = mx.get_active_memory()
    mx.reset_peak_memory()
    vision.look(done.inputs, done.network_ids)
    return len(done.network_ids), max(mx.get_peak_memory() - active, 0)


def _seconds_of_a_long_one(short: Chunk, longer: Chunk) -> float:
    each = max(longer.seconds - short.seconds, 0.0) / (longer.tokens - short.tokens)
    return longer.seconds + each * (_LONG - longer.tokens)


@dataclass(frozen=True, slots=True)
class _Tried:
    chunk: Chunk
    nbytes: int


class _Probe:
    """Computes chunks, and measures the time and MLX's peak memory."""

    def __init__(self, network: Any, clock: Callable[[], float]) -> None:
        self._network = network
        self._clock = clock

    def compute(self, caches: list[Any], tokens: int, before: int) -> _Tried:
        mx.clear_cache()
        active = mx.get_active_memory()
        mx.reset_peak_memory()
        began = self._clock()
        self._network(mx.zeros((1, tokens), dtype=mx.uint32), cache=caches)
        mx.eval([leaf.state for leaf in leaves(caches)])
        seconds = self._clock() - began
        return _Tried(Chunk(tokens, before, seconds), max(mx.get_peak_memory() - active, 0))


def _repeated(layers: Layers, caches: list[Any]) -> list[Any]:
    """Return caches that hold the first `_SHORT` tokens of `caches` `_BEHIND` times."""
    parts = [layers.borrow(caches, 0, _SHORT) for _ in range(_BEHIND)]
    return layers.assemble(parts, layers.state(caches) if layers.has_state else None, _SHORT * _BEHIND)


def _cost_of(short: _Tried, after: _Tried, longer: _Tried) -> PrefillMemoryCost:
    """Derive the three costs from three chunks; none is negative."""
    near, far = short.chunk.before, after.chunk.before
    each_far = max(longer.nbytes - after.nbytes, 0) / (longer.chunk.tokens - after.chunk.tokens)
    before = max(after.nbytes - each_far * after.chunk.tokens, 0.0) / far
    each_near = max(short.nbytes - before * near, 0.0) / short.chunk.tokens
    pair = max(each_far - each_near, 0.0) / (far - near)
    return PrefillMemoryCost(each_near, pair, before)
