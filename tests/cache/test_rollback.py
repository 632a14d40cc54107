"""Caches are taken back to before a forward pass, for every class of cache."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ChunkedKVCache, KVCache

from start_llm.cache.kinds import KINDS
from start_llm.cache.layers import Layers
from start_llm.cache.leaves import leaves
from start_llm.cache.rollback import RollbackPoint, can_roll_back
from start_llm.models.loader import load
from tests.conftest import TinyModel

FAMILIES = ["qwen3", "gemma3_text", "qwen3_5", "glm4_moe_lite", "gpt_oss"]
IDS = [3 + 7 * place % 900 for place in range(200)]


@pytest.fixture(scope="module", params=FAMILIES)
def network(request: pytest.FixtureRequest, tiny_model: TinyModel) -> Any:
    return load(tiny_model(request.param, hidden=128, layers=2)).network


def compute(network: Any, caches: list[Any], ids: list[int]) -> mx.array:
    logits = network(mx.array([ids]), cache=caches)[0, -1]
    mx.eval(logits, [leaf.state for leaf in leaves(caches)])
    return logits


@pytest.mark.product
@pytest.mark.parametrize("before", [5, 127, 128, 150])
@pytest.mark.parametrize("passes", [(9,), (1,), (1, 4, 1, 1)])
def test_what_was_computed_since_is_forgotten(network, before: int, passes: tuple[int, ...]):
    """Also behind a window of 128 tokens that is full, which passes of one token write into."""
    caches = Layers(network).fresh()
    compute(network, caches, IDS[:before])
    point = RollbackPoint(caches)
    for count in passes:
        compute(network, caches, IDS[50 : 50 + count])
    point.keep(0)
    untouched = Layers(network).fresh()
    compute(network, untouched, IDS[:before])
    for following in ([7], IDS[60:75]):
        ours, theirs = compute(network, caches, following), compute(network, untouched, following)
        assert mx.allclose(ours, theirs, atol=1e-4)


def test_a_part_can_be_kept_of_what_every_token_has_kv_of(network):
    caches = Layers(network).fresh()
    compute(network, caches, IDS[:40])
    point = RollbackPoint(caches)
    compute(network, caches, IDS[40:49])
    if not point.can_keep:
        with pytest.raises(ValueError, match="cannot keep"):
            point.keep(4)
        return
    point.keep(4)
    untouched = Layers(network).fresh()
    compute(network, untouched, IDS[:44])
    assert mx.allclose(compute(network, caches, [7]), compute(network, untouched, [7]), atol=1e-4)


def filled(cache: Any, tokens: int) -> Any:
    cache.update_and_fetch(mx.ones((1, 1, tokens, 64)), mx.ones((1, 1, tokens, 64)))
    return cache


@pytest.mark.parametrize(
    "cache",
    [KVCache(), ChunkedKVCache(8)],
    ids=lambda cache_class: type(cache_class).__name__,
)
def test_classes_without_a_network_here(cache: Any):
    filled(cache, 12)
    assert can_roll_back([cache])
    point = RollbackPoint([cache])
    offset = cache.offset
    if isinstance(cache, ChunkedKVCache):
        cache.maybe_trim_front()
    filled(cache, 3)
    point.keep(0)
    assert cache.offset == offset


def test_every_class_that_can_be_reused_says_what_a_pass_changes():
    assert all(kind.changed for kind in KINDS.values() if kind.reuse)
