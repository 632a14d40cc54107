"""The facts of well-known models are those of mlx_lm's classes for their configs."""

import copy
import math
from typing import Any

import pytest
from mlx.utils import tree_flatten

from start_llm.library.well_known import DEFAULT_APPLE_MODEL, WELL_KNOWN, WellKnown, well_known
from start_llm.models import mlx_lm_utils
from start_llm.models.architecture import is_supported
from start_llm.models.weight_files import is_tied, routed_experts


def sizes(known: WellKnown) -> dict[str, int]:
    """The weights by name. MLX is lazy: nothing is computed, so nothing is allocated."""
    config = {key: value for key, value in known.config.items() if key != "quantization"}
    model, arguments = mlx_lm_utils._get_classes(config)
    parameters: Any = tree_flatten(model(arguments.from_dict(copy.deepcopy(config))).parameters())
    tied = is_tied(config)
    return {name: math.prod(value.shape) for name, value in parameters if not (tied and "lm_head" in name)}


@pytest.mark.parametrize("known", WELL_KNOWN, ids=lambda entry: entry.repository)
@pytest.mark.sample(4)
def test_weights_and_experts_are_counted_right(known):
    assert is_supported(known.config)
    counts = sizes(known)
    assert sum(counts.values()) / 1e9 == pytest.approx(known.billions, abs=0.0006)
    routed = sum(size for name, size in counts.items() if "switch_mlp" in name or ".experts." in name)
    experts = routed_experts(known.config)
    assert (experts.parameters if experts else 0) == pytest.approx(routed, rel=0.001)


def test_there_are_twenty_and_one_is_the_default_of_a_mac():
    assert len({model.repository for model in WELL_KNOWN}) == 20
    assert well_known(DEFAULT_APPLE_MODEL).shape.window == 202_752
