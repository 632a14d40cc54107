"""Measure how many bytes of KV cache a sequence needs, on a few tokens at start-up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from start_llm.cache.kinds import Growth, growth_of
from start_llm.cache.layers import leaves
from start_llm.core.sequence_cost import SequenceCost, WindowCost

_PROBE, _TIMES = 64, 4
"""Tokens of a probe, and the number of probes after the first.

Those together are 256 tokens, the step by which mlx_lm's caches grow.
"""


def measure_sequence(network: Any, caches: Sequence[Any]) -> SequenceCost:
    """Compute a few tokens into fresh caches, then several times as many, and return the measured cost."""
    _compute(network, caches)
    first = [int(leaf.nbytes) for leaf in leaves(caches)]
    for _ in range(_TIMES):
        _compute(network, caches)
    growths = [
        growth_of(leaf) or _growth_between(was, int(leaf.nbytes))
        for leaf, was in zip(leaves(caches), first, strict=True)
    ]
    return _sequence_cost(growths)


def _compute(network: Any, caches: Sequence[Any]) -> None:
    network(mx.zeros((1, _PROBE), dtype=mx.uint32), cache=caches)
    mx.eval([leaf.state for leaf in leaves(caches)])


def _growth_between(first: int, last: int) -> Growth:
    """Estimate the growth of a leaf whose class has no entry in `cache.kinds`.

    `first` and `last` are its bytes after the first and after the last probe. Growth is assumed to be linear.
    """
    token_bytes = -(-max(last - first, 0) // (_PROBE * _TIMES))
    return Growth(token_bytes=token_bytes, state_bytes=max(last - token_bytes * _PROBE * (_TIMES + 1), 0))


def _sequence_cost(growths: Sequence[Growth]) -> SequenceCost:
    return SequenceCost(
        token_bytes=sum(growth.token_bytes for growth in growths),
        windows=tuple(WindowCost(growth.window_bytes, growth.window) for growth in growths if growth.window),
        state_bytes=sum(growth.state_bytes for growth in growths),
    )
