"""What a sequence costs in memory, measured on a few tokens before any request comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from start_llm.cache.kinds import Growth, growth_of
from start_llm.cache.layers import leaves

_PROBE, _TIMES = 64, 4
"""Tokens of a probe, and how many follow the first: together a step by which mlx_lm's caches grow."""


@dataclass(frozen=True, slots=True)
class Window:
    """Layers that keep the last tokens only: bytes of each, and how many they keep."""

    token_bytes: int
    tokens: int


@dataclass(frozen=True, slots=True)
class RowCost:
    """Bytes of one sequence's caches, by the kind of its layers.

    Attributes:
        token_bytes: of layers that keep every token.
        windows: of sliding ones.
        state_bytes: of layers whose state does not grow.
    """

    token_bytes: int = 0
    windows: tuple[Window, ...] = ()
    state_bytes: int = 0

    def bytes_of(self, tokens: int) -> int:
        """Bytes of so many tokens."""
        sliding = sum(window.token_bytes * min(tokens, window.tokens) for window in self.windows)
        return self.token_bytes * tokens + sliding + self.state_bytes

    def tokens_in(self, nbytes: int) -> int:
        """The most tokens that fit into so many bytes."""
        low, high = 0, 2**31
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.bytes_of(middle) <= nbytes else (low, middle - 1)
        return low


def measure_row(network: Any, caches: Sequence[Any]) -> RowCost:
    """Compute a few tokens into fresh caches, and several times as many after them."""
    _compute(network, caches)
    first = [int(leaf.nbytes) for leaf in leaves(caches)]
    for _ in range(_TIMES):
        _compute(network, caches)
    growths = [
        growth_of(leaf) or _growth_between(was, int(leaf.nbytes))
        for leaf, was in zip(leaves(caches), first, strict=True)
    ]
    return _row_cost(growths)


def _compute(network: Any, caches: Sequence[Any]) -> None:
    network(mx.zeros((1, _PROBE), dtype=mx.uint32), cache=caches)
    mx.eval([leaf.state for leaf in leaves(caches)])


def _growth_between(first: int, last: int) -> Growth:
    """Of a leaf of a class without a row, from its bytes after the first and after the last probe.

    It is taken to grow on like that for ever.
    """
    token_bytes = -(-max(last - first, 0) // (_PROBE * _TIMES))
    return Growth(token_bytes=token_bytes, state_bytes=max(last - token_bytes * _PROBE * (_TIMES + 1), 0))


def _row_cost(growths: Sequence[Growth]) -> RowCost:
    return RowCost(
        token_bytes=sum(growth.token_bytes for growth in growths),
        windows=tuple(Window(growth.window_bytes, growth.window) for growth in growths if growth.window),
        state_bytes=sum(growth.state_bytes for growth in growths),
    )
