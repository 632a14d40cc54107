"""How long forward passes of a few tokens take that go on with one sequence."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import mlx.core as mx

from start_llm.cache.leaves import leaves
from start_llm.cache.rollback import RollbackPoint, can_roll_back
from start_llm.engine.pace import Pace

PASSES = (1, 2, 4, 8, 16)
"""Tokens of the passes that are measured."""
_BEFORE = 64
"""Tokens before them."""
_TIMES = 3
_PATIENCE_S = 3.0
"""Predicted seconds up to which passes are measured."""
_REMEMBERED = 5


class PassTimes:
    """The seconds of passes, by their number of tokens.

    Longer ones are known by what they cost in passes of one token, which are timed all the while: so all of
    them follow a machine that gets slower or faster.

    Args:
        measured: by the numbers of `PASSES`. Where one is left out, each token takes as long as the first.
    """

    def __init__(self, measured: Mapping[int, float] | None = None) -> None:
        self._recent = {tokens: deque[float](maxlen=_REMEMBERED) for tokens in PASSES}
        self._medians: dict[int, float] = {}
        for tokens, seconds in sorted((measured or {}).items()):
            self.note(tokens, seconds)

    def note(self, tokens: int, seconds: float) -> None:
        """Record a pass. One of a length between those of `PASSES` tells of the next longer one."""
        known = next((length for length in PASSES if length >= tokens), None)
        if known is None or (known > 1 and not self.seconds(1)):
            return
        figure = seconds if known == 1 else seconds / self.seconds(1) * self._cost(known) / self._cost(tokens)
        self._recent[known].append(figure)
        self._medians[known] = median(self._recent[known])

    def seconds(self, tokens: int) -> float:
        """Return what the last passes of so many tokens took, by interpolation; 0 if nothing is known."""
        return self._medians.get(1, 0.0) * self._cost(tokens)

    def _cost(self, tokens: int) -> float:
        """Return the cost of a pass in passes of one token."""
        shorter = max(length for length in PASSES if length <= tokens)
        longer = next((length for length in PASSES if length >= tokens), None)
        low = self._cost_of(shorter)
        if longer is None:
            return low * tokens / shorter
        return low + (self._cost_of(longer) - low) * (tokens - shorter) / max(longer - shorter, 1)

    def _cost_of(self, length: int) -> float:
        return 1.0 if length == 1 else self._medians.get(length, float(length))


def measure_passes(
    network: Any, caches: list[Any], pace: Pace, clock: Callable[[], float] = time.perf_counter
) -> PassTimes | None:
    """Return how long passes take: measured, or as `pace` tells where that would take long.

    None if caches cannot be taken back.

    Args:
        caches: empty ones.
    """
    if not can_roll_back(caches):
        return None
    if pace.seconds(_BEFORE, *PASSES * (_TIMES + 1)) > _PATIENCE_S:
        return PassTimes({tokens: pace.seconds(tokens) for tokens in PASSES})
    _compute(network, caches, _BEFORE)
    return PassTimes({tokens: _seconds(network, caches, tokens, clock) for tokens in PASSES})


def _seconds(network: Any, caches: list[Any], tokens: int, clock: Callable[[], float]) -> float:
    """Return the median of some passes; the first one, which compiles kernels, does not count."""
    taken: list[float] = []
    for _ in range(_TIMES + 1):
        before, began = RollbackPoint(caches), clock()
        _compute(network, caches, tokens)
        taken.append(clock() - began)
        before.keep(0)
    return median(taken[1:])


def _compute(network: Any, caches: list[Any], tokens: int) -> None:
    logits = network(mx.zeros((1, tokens), dtype=mx.uint32), cache=caches)
    mx.eval(mx.argmax(logits, axis=-1), [leaf.state for leaf in leaves(caches)])
