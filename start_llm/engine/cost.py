"""Measure how many bytes of KV cache a sequence needs, on a few tokens at start-up."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from start_llm.cache.kinds import Growth, growth_of, kind_of
from start_llm.cache.leaves import leaves
from start_llm.core.sequence_cost import SequenceCost, WindowCost
from start_llm.engine.pace import Pace

_STEP = 256
"""Tokens by which mlx_lm's caches grow."""
_PROBES = (64, 64, 64, 64, 64)
"""Tokens that show how an unknown class grows: one step beyond the first probe."""
_PATIENCE_S = 6.0
"""Predicted seconds up to which those are computed, and two tokens otherwise."""


def measure_sequence(network: Any, caches: Sequence[Any], pace: Pace | None = None) -> SequenceCost:
    """Compute a token into fresh caches, and return the measured cost of a sequence.

    Caches whose growth does not show with one token get more.

    Args:
        pace: of the network. If more tokens would take long, the growth of those caches is estimated, and
            rather too high.
    """
    needed = [kind_of(leaf).growth_tokens for leaf in leaves(caches)]
    if all(tokens == 1 for tokens in needed):
        _compute(network, caches, 1)
        return _sequence_cost([growth for leaf in leaves(caches) if (growth := growth_of(leaf))])
    if pace is None or pace.seconds(*_PROBES) <= _PATIENCE_S:
        return _sequence_cost(_growths(network, caches, _PROBES, needed))
    return _sequence_cost(_growths(network, caches, (1, 1), needed))


def _growths(
    network: Any, caches: Sequence[Any], probes: Sequence[int], needed: Sequence[int]
) -> list[Growth]:
    """Compute probes of so many tokens, and return the growth of each leaf.

    Args:
        needed: tokens that show the growth of each leaf; 0 if its class is unknown.
    """
    _compute(network, caches, probes[0])
    first = [int(leaf.nbytes) for leaf in leaves(caches)]
    for tokens in probes[1:]:
        _compute(network, caches, tokens)
    total = sum(probes)
    return [
        (growth_of(leaf) if enough and enough <= total else None)
        or _growth_between(was, int(leaf.nbytes), total - probes[0], total)
        for leaf, was, enough in zip(leaves(caches), first, needed, strict=True)
    ]


def _compute(network: Any, caches: Sequence[Any], tokens: int) -> None:
    network(mx.zeros((1, tokens), dtype=mx.uint32), cache=caches)
    mx.eval([leaf.state for leaf in leaves(caches)])


def _growth_between(first: int, last: int, more: int, total: int) -> Growth:
    """Estimate the growth of a leaf, which is assumed to be linear.

    Of one that did not grow over less than a step, all bytes may be those of the tokens of a step.

    Args:
        first, last: its bytes after the first probe and after the last one, `more` tokens later.
        total: tokens of all probes.
    """
    if last == first and more < _STEP:
        return Growth(token_bytes=-(-last // _STEP), state_bytes=last)
    token_bytes = -(-max(last - first, 0) // more)
    return Growth(token_bytes=token_bytes, state_bytes=max(last - token_bytes * total, 0))


def _sequence_cost(growths: Sequence[Growth]) -> SequenceCost:
    return SequenceCost(
        token_bytes=sum(growth.token_bytes for growth in growths),
        windows=tuple(WindowCost(growth.window_bytes, growth.window) for growth in growths if growth.window),
        state_bytes=sum(growth.state_bytes for growth in growths),
    )
