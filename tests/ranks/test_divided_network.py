"""mlx_vlm's network of a family is divided as mlx_lm divides its own. Of the ranks only the first exists."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest

from start_llm.models import mlx_lm_utils
from start_llm.models.architecture import is_divisible
from start_llm.models.divided_network import _modules, divide_alike, join_alike
from start_llm.models.rank_group import RankGroup
from start_llm.models.vision_loader import _named, shapes_of
from tests.vision.seeing import FAMILIES, folder_of

DIVISIBLE = tuple(family for family in FAMILIES if not family.startswith("gemma"))


class Pair(NamedTuple):
    """Text networks of both packages, of which mlx_lm's is divided by two."""

    ours: Any
    theirs: Any
    ranks: RankGroup


def pair_of(family: str) -> Pair:
    from mlx_vlm.utils import load_model

    network, _, config = cast(
        "tuple[Any, Any, dict[str, Any]]",
        mlx_lm_utils.load(str(folder_of(family)), lazy=True, return_config=True),
    )
    ranks = RankGroup(cast("Any", SimpleNamespace(rank=lambda: 0, size=lambda: 2)), "127.0.0.1")
    ranks.shard(network, config)
    return Pair(network.language_model, load_model(folder_of(family), lazy=True).language_model, ranks)


@pytest.mark.parametrize("family", DIVISIBLE)
@pytest.mark.sample(3)
def test_the_heads_of_both_networks_are_as_many(family):
    ours, theirs, _ = pair_of(family)
    divide_alike(theirs, ours)
    modules, counted = _modules(ours), 0
    for name, module in _modules(theirs).items():
        for attribute in ("n_heads", "n_kv_heads", "num_attention_heads", "num_key_value_heads", "key_dim"):
            if isinstance(heads := vars(module).get(attribute), int):
                assert vars(modules[name])[attribute] == heads, f"{name}.{attribute}"
                counted += 1
    assert counted >= 4


@pytest.mark.parametrize("family", DIVISIBLE)
@pytest.mark.sample(3)
def test_layers_that_know_other_ranks_are_one_for_both_networks(family):
    ours, theirs, _ = pair_of(family)
    divide_alike(theirs, ours)
    modules = _modules(theirs)
    known = [name for name, layer in _modules(ours).items() if hasattr(layer, "group") and "proj" in name]
    assert known
    assert all(modules[name] is _modules(ours)[name] for name in known)
    assert shapes_of(theirs).keys() == _named(ours).keys()


def test_results_are_joined_where_mlx_lm_joins_them():
    """Of recurrent layers, of experts, and of a head, whose parts mlx_vlm's network knows nothing of."""
    ours, theirs, ranks = pair_of("qwen3_5_moe")
    divide_alike(theirs, ours)
    join_alike(theirs, ours, ranks)
    layer = theirs.model.layers[0]
    joins = [part._join for part in (layer.linear_attn, layer.mlp, theirs.lm_head)]
    assert joins == [ranks.summed, ranks.summed, ranks.gathered_last_axis]


def test_a_block_of_mlx_vlm_that_can_sum_sums_itself():
    ours, theirs, ranks = pair_of("qwen3_vl_moe")
    divide_alike(theirs, ours)
    join_alike(theirs, ours, ranks)
    assert theirs.model.layers[0].mlp.sharding_group is ours.model.layers[0].mlp.sharding_group is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_known_beforehand_which_families_can_be_divided(family):
    kind = family.removesuffix("_blocks")
    assert is_divisible({"model_type": kind}) == (family in DIVISIBLE)
