"""Divides mlx_vlm's text network as mlx_lm has divided its own, so that both compute one shard.

mlx_lm's networks have `shard`; most of mlx_vlm's have not. Both have the same modules under the same names,
so mlx_vlm's takes over what `shard` has left: linear layers that know the other ranks, smaller numbers of
heads, and sums over all ranks at the end of a block.
"""

from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers import distributed

from start_llm.models.rank_group import RankGroup

_LINEARS = (
    distributed.AllToShardedLinear,
    distributed.ShardedToAllLinear,
    distributed.QuantizedAllToShardedLinear,
    distributed.QuantizedShardedToAllLinear,
)
_NUMBERS = (
    *("n_heads", "n_kv_heads", "num_heads", "num_attention_heads", "num_key_value_heads"),
    *("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim", "groups"),
)
"""Attributes of modules that `shard` divides."""


def divide_alike(network: Any, divided: Any) -> None:
    """Divide a text network of mlx_vlm. Its parameters have to be shared, and its results joined, afterwards.

    Args:
        network: mlx_vlm's.
        divided: mlx_lm's, after `RankGroup.shard`.
    """
    theirs = _modules(network)
    for name, module in _modules(divided).items():
        if isinstance(module, _LINEARS):
            _put(theirs, name, module)
        elif name in theirs:
            _take_numbers(theirs[name], module)


def join_alike(network: Any, divided: Any, ranks: RankGroup) -> None:
    """Let mlx_vlm's network join the results of all ranks where mlx_lm's does.

    Parameters below such a place are not listed any more, so they have to be shared before.
    """
    theirs = _modules(network)
    for name, module in _modules(divided).items():
        if getattr(module, "sharding_group", None) is None:
            continue
        if not name:
            network.lm_head = _Joined(network.lm_head, ranks.gathered_last_axis)
        elif hasattr(theirs[name], "sharding_group"):
            theirs[name].sharding_group = module.sharding_group
        else:
            _put(theirs, name, _Joined(theirs[name], ranks.summed))


def _put(modules: dict[str, Any], name: str, module: Any) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(modules[parent], attribute, module)


def _modules(network: Any) -> dict[str, Any]:
    return dict(cast("list[tuple[str, Any]]", network.named_modules()))


def _take_numbers(theirs: Any, ours: Any) -> None:
    for name in _NUMBERS:
        if isinstance(vars(theirs).get(name), int) and isinstance(vars(ours).get(name), int):
            setattr(theirs, name, getattr(ours, name))


class _Joined:
    """A module of which each rank computes a part: a term of a sum, or some of the vocabulary."""

    def __init__(self, part: Any, join: Callable[[mx.array], mx.array]) -> None:
        self._part = part
        self._join = join

    def __call__(self, *args: Any, **options: Any) -> mx.array:
        return self._join(self._part(*args, **options))
