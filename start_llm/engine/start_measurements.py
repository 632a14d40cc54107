"""Measure at start-up the memory and the time that prefill chunks take.

How long that takes is known from a few tokens. Where it would take longer than `PATIENCE_S`, a shorter chunk
is measured.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from start_llm.cache.layers import Layers
from start_llm.cache.leaves import leaves
from start_llm.engine.pace import Pace
from start_llm.engine.pacing import LONGEST_CHUNK, Chunk
from start_llm.models.vision import Vision
from start_llm.models.vision_families import blank

_SHORT, _LONGER, _LONG, _BEHIND = 64, 128, 512, 16
"""Tokens of the measured chunks; `_BEHIND` short chunks are put before the later ones."""
PATIENCE_S = 12.0
"""Predicted seconds up to which these chunks are measured, without the long one."""
_LONG_PATIENCE_S = 2.0
"""Predicted seconds up to which the long chunk is tried. It shows more of what a mixture of experts takes."""
_FEW, _FEWER, _FEW_PATIENCE_S = 8, 2, 4.0
"""Tokens from which the pace is measured, beside one: the fewer ones if the others could take that long."""
_STEADY_S = 0.5
"""Seconds from which a few tokens are computed twice: at first, kernels are compiled or weights read."""
_SHORTEST = 16
_SIDES = (112, 224, 448)
"""Pixels of the sides of the images that the tower is tried on: up to 196 tokens of a Qwen3-VL."""
_TOWER_PATIENCE_S = 4.0
"""Predicted seconds up to which the tower is tried on a larger image."""
_SLOWER = 4
"""An image with sides twice as long takes this many times as long, or longer."""
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
        pace: of a forward pass of a few tokens.
    """

    cost: PrefillMemoryCost
    chunks: tuple[Chunk, ...]
    pace: Pace

    @property
    def notice(self) -> str:
        """A sentence on what was left out because the device is slow; empty if nothing was."""
        longest = max(chunk.tokens for chunk in self.chunks)
        if longest >= _LONGER:
            return ""
        return (
            f"A token takes {self.pace.seconds(1):,.1f} s on this machine, so the time of a prompt was "
            f"measured on {longest} tokens in place of {_LONGER}, and its memory was estimated."
        )


def measure_work(
    network: Any,
    layers: Layers,
    clock: Callable[[], float] = time.perf_counter,
    *,
    estimated: PrefillMemoryCost = PrefillMemoryCost(0.0),
) -> PrefillProfile:
    """Compute short chunks with few and with many tokens before them, and return what they cost.

    The tokens before are one short chunk's KV, repeated: only their number matters, not their values.

    Args:
        clock: seconds.
        estimated: the cost in memory where only few tokens are computed, which do not show it.
    """
    probe = _Probe(network, clock, layers.fresh())
    near = _near(probe)
    pace = Pace.between(*(result.chunk for result in near))
    if pace.seconds(_SHORT, _SHORT, _SHORT, _SHORT, _LONGER) <= PATIENCE_S:
        return _measure(_Probe(network, clock, layers.fresh()), layers, pace)
    return PrefillProfile(estimated, _measure_shorter(probe, pace, near), pace)


def _near(probe: _Probe) -> tuple[_Tried, _Tried]:
    """Compute one token, and then a few.

    What takes long is computed twice, and the faster time counts, except for what takes as long again.
    """
    single = probe.compute(1)
    if single.chunk.seconds > _STEADY_S:
        single = _faster(single, probe.compute(1))
    if _FEW * single.chunk.seconds > _FEW_PATIENCE_S:
        return single, probe.compute(_FEWER)
    few = probe.compute(_FEW)
    return single, _faster(few, probe.compute(_FEW)) if few.chunk.seconds > _STEADY_S else few


def _faster(first: _Tried, second: _Tried) -> _Tried:
    return min(first, second, key=lambda tried: tried.chunk.seconds)


def _measure(probe: _Probe, layers: Layers, pace: Pace) -> PrefillProfile:
    probe.compute(_SHORT)
    short = probe.compute(_SHORT)
    _go_far(probe, layers)
    probe.compute(_SHORT)
    after = probe.compute(_SHORT)
    longer = probe.compute(_LONGER)
    tried = [short, after, longer]
    if _seconds_of_a_long_one(after.chunk, longer.chunk) <= _LONG_PATIENCE_S:
        tried.append(probe.compute(_LONG))
    return PrefillProfile(_cost_of(short, after, longer), tuple(result.chunk for result in tried), pace)


def _measure_shorter(probe: _Probe, pace: Pace, near: Sequence[_Tried]) -> tuple[Chunk, ...]:
    """Compute a chunk that is as long as patience allows, and return all that were timed.

    Args:
        probe: has computed the chunks `near`.
    """
    tokens = _SHORT
    while tokens > 1 and pace.seconds(tokens) > PATIENCE_S:
        tokens //= 2
    return tuple(result.chunk for result in (*near, probe.compute(tokens)))


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
        return max(bisect_right(range(_MOST_TOKENS + 1), nbytes, key=self.bytes_of) - 1, _SHORTEST)


def measure_tower(vision: Vision, clock: Callable[[], float] = time.perf_counter) -> TowerMemoryCost:
    """Run the vision tower on blank images as large as patience allows, and return what they cost.

    The last two show it. Where a single one was run, all of its memory is assumed to be scores of
    attention, which is rather too much.

    Args:
        clock: seconds.
    """
    looks = [_time_tower(vision, _SIDES[0], clock)]
    for side in _SIDES[1:]:
        if _SLOWER * looks[-1].seconds > _TOWER_PATIENCE_S:
            break
        looks.append(_time_tower(vision, side, clock))
    large = looks[-1]
    if len(looks) == 1:
        return TowerMemoryCost(pair_bytes=large.nbytes / large.tokens**2)
    small = looks[-2]
    if large.tokens == small.tokens:
        return TowerMemoryCost(large.nbytes / large.tokens, most_tokens=large.tokens)
    pair = max(large.nbytes / large.tokens - small.nbytes / small.tokens, 0.0) / (large.tokens - small.tokens)
    return TowerMemoryCost(max(large.nbytes / large.tokens - pair * large.tokens, 0.0), pair)


class _Look(NamedTuple):
    """A run of the vision tower on one image."""

    tokens: int
    nbytes: int
    seconds: float


def _time_tower(vision: Vision, side: int, clock: Callable[[], float]) -> _Look:
    """Time the tower on a square image. What takes long is done twice: at first, kernels are compiled."""
    done = vision.processor.preprocess(blank((side, side)))

    def look() -> _Look:
        active, began = _active_bytes(), clock()
        vision.look(done.inputs, done.network_ids)
        return _Look(len(done.network_ids), max(mx.get_peak_memory() - active, 0), clock() - began)

    first = look()
    return min(first, look(), key=lambda timing: timing.seconds) if first.seconds > _STEADY_S else first


def _active_bytes() -> int:
    """Return MLX's memory in use, and measure its peak from now on.

    A CUDA device frees what a step took only when all of it has run, which is after its results are there.
    """
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    return mx.get_active_memory()


def _seconds_of_a_long_one(short: Chunk, longer: Chunk) -> float:
    each = max(longer.seconds - short.seconds, 0.0) / (longer.tokens - short.tokens)
    return longer.seconds + each * (_LONG - longer.tokens)


@dataclass(frozen=True, slots=True)
class _Tried:
    chunk: Chunk
    nbytes: int


class _Probe:
    """Computes chunks one after the other, and measures the time and MLX's peak memory.

    Attributes:
        caches: what the chunks are computed into.
        held: tokens in them.
    """

    def __init__(self, network: Any, clock: Callable[[], float], caches: list[Any]) -> None:
        self._network = network
        self._clock = clock
        self.caches = caches
        self.held = 0

    def compute(self, tokens: int) -> _Tried:
        active = _active_bytes()
        began = self._clock()
        self._network(mx.zeros((1, tokens), dtype=mx.uint32), cache=self.caches)
        mx.eval([leaf.state for leaf in leaves(self.caches)])
        chunk = Chunk(tokens, self.held, self._clock() - began)
        self.held += tokens
        return _Tried(chunk, max(mx.get_peak_memory() - active, 0))


def _go_far(probe: _Probe, layers: Layers) -> None:
    """Let a probe hold its first short chunk again and again, where it can be repeated."""
    if layers.unknown or not layers.has_trimmable:
        return
    parts = [layers.borrow(probe.caches, 0, _SHORT) for _ in range(_BEHIND)]
    state = layers.state(probe.caches) if layers.has_state else None
    probe.caches = layers.assemble(parts, state, _SHORT * _BEHIND)
    probe.held = _SHORT * _BEHIND


def _cost_of(short: _Tried, after: _Tried, longer: _Tried) -> PrefillMemoryCost:
    """Derive the three costs from three chunks; none is negative."""
    near, far = short.chunk.before, after.chunk.before
    each_far = max(longer.nbytes - after.nbytes, 0) / (longer.chunk.tokens - after.chunk.tokens)
    before = max(after.nbytes - each_far * after.chunk.tokens, 0.0) / far
    each_near = max(short.nbytes - before * near, 0.0) / short.chunk.tokens
    pair = max(each_far - each_near, 0.0) / (far - near)
    return PrefillMemoryCost(each_near, pair, before)
