"""A cache of each class is taken out, put back and counted by its sequence of the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache
from mlx_lm.models.deepseek_v41 import LayerCache, Model, ModelArgs

from start_llm.cache.kinds import KINDS, growth_of, label_of, reuse_of
from start_llm.cache.kv_format import KVFormat
from start_llm.cache.layers import Layers
from start_llm.cache.leaves import leaves
from start_llm.engine.cost import measure_sequence
from tests.cache.conversations import PAGE
from tests.cache.disk import on_disk
from tests.cache.integrity import check_cache, length_of
from tests.engine.harness import uncached_resources
from tests.engine.test_guards import Counting, cached, counting

IDS = [(7 * place) % 61 for place in range(400)]
NEAR = 1e-4


@pytest.fixture(scope="module")
def network() -> Any:
    """DeepSeek V4.1: a window of 16 tokens, and groups of 4 in two layers, which two others read."""
    mx.random.seed(0)
    made = Model(
        ModelArgs(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=2,
            head_dim=32,
            q_lora_rank=16,
            qk_rope_head_dim=8,
            o_groups=2,
            o_lora_rank=8,
            moe_intermediate_size=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            rms_norm_eps=1e-6,
            sliding_window=16,
            compress_ratios=(0, 4, 4, 4),
            kv_source_layer_ids=(1, 2),
            index_source_layer_ids=(1, 2),
            hc_mult=2,
            index_n_heads=2,
            index_head_dim=32,
            index_topk=16,
        )
    )
    mx.eval(made.parameters())
    return made


def compute(network: Any, caches: list[Any], ids: list[int]) -> mx.array:
    """The last logits."""
    logits = network(mx.array([ids]), cache=caches)[0, -1]
    mx.eval(logits, [leaf.state for leaf in leaves(caches)])
    return logits


@pytest.mark.thorough
@pytest.mark.parametrize("length", [3, 16, 61, 200])
def test_compressed_attention_goes_on_from_its_state(network, length: int):
    """Before the first group is full, with a group that is open, and far beyond the window."""
    layers = Layers(network)
    caches = layers.fresh()
    compute(network, caches, IDS[:length])
    state = layers.state(caches)
    expected = compute(network, caches, IDS[length : length + 9])
    for _ in range(2):
        restored = layers.assemble([], state, length)
        assert [leaf.offset for leaf in restored] == [length] * 4
        logits = compute(network, restored, IDS[length : length + 9])
        assert mx.allclose(logits, expected, atol=NEAR)


def test_compressed_attention_does_not_notice_that_its_caches_were_settled(network):
    layers = Layers(network)
    settled, other = layers.fresh(), layers.fresh()
    for caches in (settled, other):
        compute(network, caches, IDS[:30])
    layers.compact(settled)
    expected = compute(network, other, IDS[30:40])
    assert mx.allclose(compute(network, settled, IDS[30:40]), expected, atol=NEAR)


def test_a_network_with_compressed_attention_is_served_from_the_cache(network):
    layers = Layers(network)
    assert (layers.unknown, layers.has_state, layers.has_trimmable) == ([], True, False)


@pytest.mark.thorough
@pytest.mark.parametrize("length", [100, 400])
def test_what_compressed_attention_keeps_for_good_is_in_the_cost_of_a_prompt(network, length: int):
    """It was taken for a state that does not grow: sequences were let in that did not fit."""
    layers = Layers(network)
    cost = measure_sequence(network, layers.fresh())
    caches = layers.fresh()
    for start in range(0, length, 50):
        compute(network, caches, IDS[start : start + 50])
    held = layers.nbytes(caches)
    assert held <= cost.bytes_of(length) <= 1.2 * held
    assert cost.bytes_of(10 * length) > 5 * cost.bytes_of(length)


class Grows:
    """A class of cache that no sequence describes: 100 bytes once, and room for 256 tokens of 8 bytes."""

    def __init__(self) -> None:
        self.tokens = 0

    @property
    def nbytes(self) -> int:
        return 100 + 8 * 256 * -(-self.tokens // 256)

    @property
    def state(self) -> mx.array:
        return mx.array(self.tokens)


def feed(tokens: mx.array, cache: list[Grows]) -> mx.array:
    for layer in cache:
        layer.tokens += tokens.shape[1]
    return tokens


def test_the_cost_of_an_unknown_class_is_measured():
    cost = measure_sequence(feed, [Grows()])
    assert cost.token_bytes == 8
    assert cost.bytes_of(1000) >= 8 * 1000 + 100


def test_a_window_that_keeps_its_first_tokens_is_counted_but_not_reused():
    sinks = RotatingKVCache(16, keep=4)
    sinks.update_and_fetch(mx.zeros((1, 2, 5, 8)), mx.zeros((1, 2, 5, 8)))
    assert reuse_of(sinks) is None
    growth = growth_of(sinks)
    assert growth is not None
    assert (growth.window, growth.window_bytes, growth.token_bytes) == (16, 2 * 2 * 8 * 4, 0)


def test_layers_are_named_in_the_words_of_the_field():
    caches = [KVCache(), RotatingKVCache(16), ArraysCache(2), LayerCache(16), object()]
    labels = ["full attention", "sliding window", "recurrent state", "compressed attention", "object"]
    assert [label_of(cache) for cache in caches] == labels


def test_every_class_has_words_and_what_can_be_used_again_is_counted():
    for name, kind in KINDS.items():
        assert kind.words, name
        assert (kind.reuse is None) == (kind.growth is None), name


def test_a_layer_that_does_not_attend_is_no_reason_to_compute_again():
    """Nemotron NAS has a cache for a linear layer, which stays empty."""
    layers = Layers(Attending())
    caches = layers.fresh()
    keys = mx.random.normal((1, 2, 40, 8))
    caches[0].update_and_fetch(keys, keys)
    restored = layers.assemble([layers.cut(caches, 0, 30), layers.view(caches, 30, 40)], None, 40)
    assert mx.array_equal(restored[0].keys, keys)
    assert restored[1].empty()
    assert length_of(layers, caches) == length_of(layers, restored) == 40


class Attending:
    """A network with two caches, the second of which it leaves alone."""

    def make_cache(self) -> list[Any]:
        return [KVCache(), KVCache()]


class Linear(Counting):
    """One whose second layer has a cache that stays empty."""

    def make_cache(self) -> list[Any]:
        return [*super().make_cache(), KVCache()]


EXACT_OR_NOT = pytest.mark.parametrize("kv", [None, KVFormat(8, 32, PAGE)], ids=["exact", "quantised"])


@EXACT_OR_NOT
def test_a_conversation_beside_an_empty_layer_is_split_trimmed_and_restored(kv: KVFormat | None):
    """Of the arrays in its run, a third belongs to no page: they are cut back."""
    engine = counting(network=Linear(has_state=False), kv=kv)
    ids = tuple(range(300))
    engine.say(ids, 2)
    store = engine.cache._store
    for seq_cache in store.seq_caches:
        store.split_into_pages(seq_cache)
    for page in [page for page in store.tree.pages() if page.end > 200][::-1]:
        store.tree.remove(page)
    while store.tree.untrimmed_runs:
        engine.cache.tidy(1)
    assert not store.tree.unused_run_bytes
    again = engine.say((*ids[:190], 5, 6), 2)
    assert (cached(again), again.tokens) == (190, [7, 8])
    check_cache(engine.cache)


@EXACT_OR_NOT
def test_the_disk_restores_a_conversation_beside_an_empty_layer(kv: KVFormat | None, tmp_path: Path):
    ids = tuple(range(300))
    network = Linear(has_state=False)
    resources = uncached_resources(network, lambda _: b"a", frozenset(), max_sequences=1, batches=False)
    with on_disk(resources, tmp_path, kv=kv) as engine:
        engine.say(ids, 2)
    with on_disk(resources, tmp_path, kv=kv) as engine:
        again = engine.say((*ids, 300, 301), 2)
        assert (cached(again), again.tokens) == (301, [302, 303])
        check_cache(engine.cache)
