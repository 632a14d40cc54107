"""The memory that computing a chunk of a prompt takes, measured before any request comes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from start_llm.cache.layers import Layers, leaves
from start_llm.engine.pacing import LONGEST_CHUNK, Chunk

_SHORT, _LONGER, _LONG, _BEHIND = 64, 128, 512, 16
"""Tokens of the chunks that are measured, and how often the short one stands in front of a chunk."""
_PATIENCE_S = 2.0
"""The long chunk is tried where it takes no longer: it tells more of what a mixture of experts takes."""
_SHORTEST = 16


@dataclass(frozen=True, slots=True)
class WorkCost:
    """Bytes of a chunk of L tokens behind n others, beside what it leaves in the caches.

    They are L (token + pair n) + before n.

    Attributes:
        token_bytes: activations of each token.
        pair_bytes: scores of each token with each one before it, for all heads, where attention is not fused.
        before_bytes: what is made of each token before the chunk: MLA decompresses them.
    """

    token_bytes: float
    pair_bytes: float = 0.0
    before_bytes: float = 0.0

    def bytes_of(self, tokens: int, before: int) -> int:
        return int(tokens * (self.token_bytes + self.pair_bytes * before) + self.before_bytes * before)

    def longest(self, nbytes: int, before: int) -> int:
        """The longest chunk that takes no more than this; a short one always may."""
        left = nbytes - self.before_bytes * before
        each = max(self.token_bytes + self.pair_bytes * before, 1.0)
        return min(max(int(left / each), _SHORTEST), LONGEST_CHUNK)


@dataclass(frozen=True, slots=True)
class MeasuredWork:
    """What computing cost when it was tried.

    Attributes:
        cost: in memory.
        chunks: in time.
    """

    cost: WorkCost
    chunks: tuple[Chunk, ...]


def measure_work(
    network: Any, layers: Layers, clock: Callable[[], float] = time.perf_counter
) -> MeasuredWork:
    """Compute short chunks with little and with more in front of them.

    What stands in front is one short chunk's KV, many times over: its values do not matter, only its length.

    Args:
        clock: seconds.
    """
    probe = _Probe(network, clock)
    near = layers.fresh()
    probe.compute(near, _SHORT, 0)
    short = probe.compute(near, _SHORT, _SHORT)
    far, before = near, 2 * _SHORT
    if layers.is_sliced and not layers.unknown:
        far, before = _repeated(layers, near), _BEHIND * _SHORT
    probe.compute(far, _SHORT, before)
    behind = probe.compute(far, _SHORT, before + _SHORT)
    longer = probe.compute(far, _LONGER, before + 2 * _SHORT)
    tried = [short, behind, longer]
    if _seconds_of_a_long_one(behind.chunk, longer.chunk) <= _PATIENCE_S:
        tried.append(probe.compute(far, _LONG, before + 2 * _SHORT + _LONGER))
    return MeasuredWork(_cost_of(short, behind, longer), tuple(one.chunk for one in tried))


def _seconds_of_a_long_one(short: Chunk, longer: Chunk) -> float:
    each = max(longer.seconds - short.seconds, 0.0) / (longer.tokens - short.tokens)
    return longer.seconds + each * (_LONG - longer.tokens)


@dataclass(frozen=True, slots=True)
class _Tried:
    chunk: Chunk
    nbytes: int


class _Probe:
    """Computes chunks and looks at the clock and at MLX's memory."""

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
    """Caches with the first tokens of these many times over."""
    parts = [layers.borrow(caches, 0, _SHORT) for _ in range(_BEHIND)]
    return layers.assemble(parts, layers.state(caches) if layers.has_state else None, _SHORT * _BEHIND)


def _cost_of(short: _Tried, behind: _Tried, longer: _Tried) -> WorkCost:
    """Three numbers out of three chunks; none is below zero."""
    near, far = short.chunk.before, behind.chunk.before
    each_far = max(longer.nbytes - behind.nbytes, 0) / (longer.chunk.tokens - behind.chunk.tokens)
    before = max(behind.nbytes - each_far * behind.chunk.tokens, 0.0) / far
    each_near = max(short.nbytes - before * near, 0.0) / short.chunk.tokens
    pair = max(each_far - each_near, 0.0) / (far - near)
    return WorkCost(each_near, pair, before)
