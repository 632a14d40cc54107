"""One type for each class of cache says what an engine without a cache says; what is planted is found.

All types: `benchmarks truth --only types`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from scripts import model_types
from scripts.model_types import build
from start_llm.cache.arrays import StateSnapshot
from start_llm.cache.layers import Layers
from start_llm.cache.leaves import leaves
from start_llm.cache.pages import EarlierState
from tests.cache.type_trial import LEAST_FELT, Finding, Trial

FEW = ((20, 75, 50),)
TYPES = {
    "llama": ("KVCache", "to the token"),
    "deepseek_v32": ("KVCache", "to the token"),
    "cohere2": ("KVCache, RotatingKVCache", "at checkpoints"),
    "falcon_h1": ("ArraysCache, KVCache", "at checkpoints"),
    "deepseek_v41": ("LayerCache", "at checkpoints"),
    "llama4": ("ChunkedKVCache, KVCache", "at checkpoints"),
    "minimax_m3_vl": ("KVCache", "to the token"),
}
TAKE_TURNS = {"deepseek_v41", "llama4", "minimax_m3_vl"}

network = cache(build)


def tried(
    model_type: str, layers: Callable[[Any], Layers] = Layers, together: Sequence[Sequence[int]] = FEW
) -> Finding:
    return Trial(model_type, network(model_type), layers(network(model_type)), together).run()


@pytest.mark.long
@pytest.mark.parametrize("model_type", TYPES)
def test_a_type_of_each_class_of_cache_answers_rightly(model_type: str):
    finding = tried(model_type)
    assert finding.wrong == {}
    assert (finding.caches, finding.reuse) == TYPES[model_type]
    assert (finding.widest == 1) == (model_type in TAKE_TURNS)
    assert finding.felt > LEAST_FELT


class OnePositionOff(Layers):
    """Restored caches take themselves for longer by one token."""

    def assemble(self, *arguments: Any, **more: Any) -> list[Any]:
        caches = super().assemble(*arguments, **more)
        for leaf in leaves(caches):
            if hasattr(leaf, "offset"):
                leaf.offset += 1
        return caches


class FormerState(Layers):
    """A checkpoint keeps the state that was kept first, whatever is computed later."""

    def __init__(self, network: Any) -> None:
        super().__init__(network)
        self._first: StateSnapshot | None = None

    def state(
        self, caches: Sequence[Any], reach: int = 0, earlier: EarlierState | None = None, ahead: int = 0
    ) -> StateSnapshot:
        self._first = self._first or super().state(caches, reach, earlier, ahead)
        return self._first


@pytest.mark.parametrize(
    ("model_type", "planted"),
    [
        ("llama", OnePositionOff),
        ("cohere2", FormerState),
        ("falcon_h1", FormerState),
        pytest.param("deepseek_v41", FormerState, marks=pytest.mark.long),
    ],
)
@pytest.mark.thorough
def test_what_is_planted_is_found(model_type: str, planted: Callable[[Any], Layers]):
    assert tried(model_type, planted, together=()).wrong


def test_every_type_has_a_configuration():
    """Its own class takes it; a new type of mlx_lm asks for a sequence."""
    types = list(model_types.model_types())
    assert len(types) > 120
    for model_type in types:
        assert model_types.config_of(model_type)["model_type"] == model_type


def test_no_table_speaks_of_a_type_that_is_gone():
    known = {*model_types.model_types(), *model_types.SET_ASIDE}
    assert model_types.TEXT.keys() <= known
    assert model_types.ROWS.keys() <= known
