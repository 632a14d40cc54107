"""The self-test tries whether sequences may share a forward pass; nothing is assumed."""

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ChunkedKVCache, KVCache

from start_llm.cache.layers import Layers
from start_llm.engine.self_test import check_batching
from start_llm.models.loader import load
from tests.conftest import TinyModel
from tests.engine.harness import Breakdown, FailsOnce, Wrapped

RIGHT = [
    "qwen3",
    "qwen3_moe",
    "qwen3_5",
    "qwen3_next",
    "gemma3_text",
    "gpt_oss",
    "glm4_moe_lite",
    "deepseek_v3",
]


@pytest.mark.parametrize("family", RIGHT)
@pytest.mark.parametrize("max_sequences", [2, 4])
@pytest.mark.product
@pytest.mark.sample(8)
def test_architectures_that_batch_rightly_pass(tiny_model: TinyModel, family: str, max_sequences: int):
    network = load(tiny_model(family, hidden=128, layers=4)).network
    verdict = check_batching(network, Layers(network).fresh, max_sequences)
    assert (verdict.batches, verdict.reason) == (True, "")


class Masked:
    """Attends to what the mask of its cache lets it see; `spoils` may change that mask."""

    def __init__(self, spoils: Any = lambda mask: mask) -> None:
        self._spoils = spoils
        mx.random.seed(3)
        self._table = mx.random.normal((80, 2, 16))
        self._out = mx.random.normal((32, 80))

    def make_cache(self) -> list[Any]:
        return [KVCache()]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        given = self._table[tokens].swapaxes(1, 2)
        mask = cache[0].make_mask(tokens.shape[1], return_array=True, window_size=None)
        keys, values = cache[0].update_and_fetch(given, given)
        mask = self._spoils(mask) if isinstance(mask, mx.array) else mask
        heard = mx.fast.scaled_dot_product_attention(given, keys, values, scale=0.1, mask=mask)
        return heard.swapaxes(1, 2).flatten(2) @ self._out


def verdict_of(network: Any, max_sequences: int = 4) -> Any:
    return check_batching(network, network.make_cache, max_sequences)


def test_a_network_that_sees_the_padding_of_its_batch_takes_turns():
    assert verdict_of(Masked()).batches
    verdict = verdict_of(Masked(mx.ones_like))
    assert not verdict.batches
    assert verdict.reason == "with 2 sequences at once it computes other logits than alone"


def test_a_network_that_mixes_up_three_sequences_and_not_two_takes_turns():
    """gemma2: the mask of as many sequences as there are heads fits, and is the heads'."""
    verdict = verdict_of(Masked(lambda mask: mask[::-1] if mask.shape[0] == 3 else mask))
    assert verdict.reason == "with 3 sequences at once it computes other logits than alone"
    assert verdict_of(
        Masked(lambda mask: mask[::-1] if mask.shape[0] == 3 else mask), max_sequences=2
    ).batches
    assert not verdict_of(Masked(lambda mask: mask[::-1] if mask.shape[0] == 4 else mask)).batches


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_network_that_raises_for_several_sequences_takes_turns(nth: int):
    broken = Wrapped(Masked(), FailsOnce(lambda shape: shape[0] > 1, nth))
    verdict = verdict_of(broken)
    assert verdict.reason == "several sequences at once raise Breakdown: broken on purpose"


def test_a_network_that_fails_for_a_single_sequence_is_no_matter_of_batches():
    with pytest.raises(Breakdown):
        verdict_of(Wrapped(Masked(), FailsOnce(lambda shape: shape[0] == 1)))


class NoNumbers(Masked):
    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        logits = super().__call__(tokens, cache)
        return logits * (float("nan") if tokens.shape[0] > 1 else 1)


def test_no_number_is_no_right_one():
    assert not verdict_of(NoNumbers()).batches


class Chunked(Masked):
    def make_cache(self) -> list[Any]:
        return [ChunkedKVCache(16)]


def test_caches_that_cannot_be_merged_and_one_sequence_at_a_time_need_no_trial():
    assert verdict_of(Chunked()).reason == "its caches cannot be merged"
    assert verdict_of(Masked(), max_sequences=1).reason == "one reply at a time is all that BATCH allows"
