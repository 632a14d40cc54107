"""A slice taken out of any kind of cache can be put into a fresh one, and never changes in between."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
)

from start_llm.cache import arrays as kept_arrays
from start_llm.cache.arrays import KVSlice, TokenRange, joined
from start_llm.cache.layers import Layers, materialize
from tests.cache.integrity import covers, length_of
from tests.mlx_memory import active_bytes, rounded_up_bytes

WINDOW = 24
SIDES = (3, 4, 7)


class Caches:
    """A network that only has caches."""

    def __init__(self, make: Callable[[], list[Any]]) -> None:
        self.make_cache = make


@cache
def random_numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


@dataclass
class Feeder:
    """Gives a leaf what a network would give it for `count` tokens after `done`."""

    heads: int = 2
    key: int = 64
    value: int = 64

    def feed(self, leaf: Any, done: int, count: int) -> Any:
        """Return the keys, values or state that attention, or a recurrence, gets to see of it."""
        if isinstance(leaf, CacheList):
            return [self.feed(inner, done, count) for inner in leaf.caches]
        if isinstance(leaf, ArraysCache):
            return self._recur(leaf, done, count)
        if isinstance(leaf, ChunkedKVCache):
            leaf.maybe_trim_front()
        keys, values = (self._tokens(width, done, count) for width in (self.key, self.value))
        return leaf.update_and_fetch(keys, values)

    def _tokens(self, width: int, done: int, count: int) -> mx.array:
        return mx.array(random_numbers(1, self.heads, 400, width)[..., done : done + count, :])

    def _recur(self, leaf: ArraysCache, done: int, count: int) -> mx.array:
        inputs = self._tokens(self.key, done, count)[:, 0]
        for place in range(len(leaf.cache)):
            start = mx.zeros((1, 1, self.key)) if leaf[place] is None else leaf[place]
            # A slice of something longer, as a convolution leaves it.
            leaf[place] = mx.concatenate([start, inputs], axis=1).cumsum(axis=1)[:, -1:]
        return leaf[0]


@dataclass
class Kind:
    """Caches of one network, what feeds them, and lengths at which they look different inside."""

    make: Callable[[], list[Any]]
    feeder: Feeder
    lengths: tuple[int, ...] = (1, 5, 70)


PLAIN, LATENT = Feeder(), Feeder(heads=1, key=48, value=16)
SLICED = {
    "plain": Kind(lambda: [KVCache(), KVCache()], PLAIN),
    "latent": Kind(lambda: [KVCache()], LATENT),
    "of several heads and sizes": Kind(lambda: [KVCache()], Feeder(heads=3, key=32, value=8)),
    "a list": Kind(lambda: [CacheList(KVCache(), KVCache())], LATENT),
}
WHOLE = {
    "a window": Kind(lambda: [RotatingKVCache(WINDOW)], PLAIN, (1, 5, WINDOW - 1, WINDOW, WINDOW + 1, 70)),
    "a latent window": Kind(lambda: [RotatingKVCache(WINDOW)], LATENT, (5, WINDOW, 70)),
    "chunks": Kind(lambda: [ChunkedKVCache(WINDOW)], PLAIN, (1, 5, WINDOW, WINDOW + 1, 70)),
    "recurrent": Kind(lambda: [ArraysCache(2), ArraysCache(1)], LATENT),
}
MIXED = {
    "recurrent and plain": Kind(lambda: [ArraysCache(2), KVCache()], PLAIN),
    "a list of both": Kind(lambda: [CacheList(ArraysCache(2), KVCache())], LATENT),
    "a window and plain": Kind(lambda: [RotatingKVCache(WINDOW), KVCache()], PLAIN, (5, WINDOW, 70)),
    "chunks and plain": Kind(lambda: [ChunkedKVCache(WINDOW), KVCache()], PLAIN, (5, WINDOW, 70)),
}
CHUNKS = {"one token at a time": 1, "short chunks": 10, "one chunk": 1000}


def fed(kind: Kind, length: int, chunk: int = 1000) -> list[Any]:
    """Caches that hold `length` tokens."""
    caches = kind.make()
    feed(kind, caches, 0, length, chunk)
    return caches


def feed(kind: Kind, caches: list[Any], done: int, count: int, chunk: int = 1000) -> list[Any]:
    seen: list[Any] = []
    for start in range(done, done + count, chunk):
        seen = [kind.feeder.feed(layer, start, min(chunk, done + count - start)) for layer in caches]
        mx.eval([layer.state for layer in caches])
    return seen


def arrays_of(value: Any) -> list[np.ndarray]:
    """Every array of a nested value; what a rotated window shows is put in order first."""
    if isinstance(value, mx.array):
        return [np.array(value)]
    if isinstance(value, list | tuple):
        return [array for inner in value for array in arrays_of(inner)]
    return []


def content(caches: list[Any]) -> list[np.ndarray]:
    """Return the values in the caches, whatever room they have left and wherever a window is turned to."""
    values: list[Any] = []
    for leaf in leaves(caches):
        if isinstance(leaf, RotatingKVCache):
            values += [leaf._temporal_order(part)[..., -WINDOW:, :] for part in (leaf.keys, leaf.values)]
        elif isinstance(leaf, ArraysCache):
            values += leaf.cache
        else:
            values.append(leaf.keys_and_values())
    return arrays_of(values)


def leaves(caches: list[Any]) -> Iterator[Any]:
    for layer in caches:
        if isinstance(layer, CacheList):
            yield from leaves(list(layer.caches))
        else:
            yield layer


def offsets(caches: list[Any]) -> list[int]:
    return [leaf.offset for leaf in leaves(caches) if not isinstance(leaf, ArraysCache)]


def assert_equal(left: list[np.ndarray], right: list[np.ndarray]) -> None:
    assert [array.shape for array in left] == [array.shape for array in right]
    for array, other in zip(left, right, strict=True):
        np.testing.assert_allclose(array, other, rtol=1e-5, atol=1e-5)


def restored(layers: Layers, caches: list[Any], length: int) -> list[Any]:
    """A copy through pages of uneven lengths, and state."""
    edges = sorted({0, length // 3, length // 2, length})
    cuts = [layers.cut(caches, start, end) for start, end in itertools.pairwise(edges)]
    return layers.assemble(cuts, layers.state(caches) if layers.has_state else None, length)


def cases(kinds: dict[str, Kind]) -> list[Any]:
    return [
        pytest.param(kind, length, chunk, id=f"{name}, {length} tokens, {how}")
        for name, kind in kinds.items()
        for length in kind.lengths
        for how, chunk in CHUNKS.items()
    ]


# --------------------------------------------------------------------------------------- out of one, into one


@pytest.mark.parametrize(("kind", "length", "chunk"), cases(SLICED | WHOLE | MIXED))
@pytest.mark.sample(8)
def test_what_is_taken_out_is_all_that_is_needed_to_go_on(kind, length, chunk):
    source = fed(kind, length, chunk)
    layers = Layers(Caches(kind.make))
    copy = restored(layers, source, length)
    assert offsets(copy) == offsets(source)
    assert_equal(content(copy), content(source))
    for step in (1, 1, 30, 1):
        done = offsets(copy)[0] if offsets(copy) else length
        feed(kind, copy, done, step)
        feed(kind, source, done, step)
        length = done + step
        assert_equal(content(copy), content(source))
        assert offsets(copy) == offsets(source)


@pytest.mark.parametrize("kind", SLICED.values(), ids=SLICED)
def test_a_view_and_a_part_show_the_same_tokens_as_a_cut(kind):
    caches, layers = fed(kind, 150), Layers(Caches(kind.make))
    cut = layers.cut(caches, 20, 90)
    assert_equal(arrays_of(layers.view(caches, 20, 90).leaves), arrays_of(cut.leaves))
    assert_equal(arrays_of(cut.part(10, 30).leaves), arrays_of(layers.cut(caches, 30, 50).leaves))
    assert length_of(layers, layers.assemble([cut.part(0, 30), cut.part(30, 70)], None, 70)) == 70
    assert cut.nbytes == sum(array.nbytes for array in arrays_of(cut.leaves))
    assert cut.arrays == len(arrays_of(cut.leaves))


@pytest.mark.parametrize("kind", SLICED.values(), ids=SLICED)
def test_what_is_trimmed_is_forgotten_and_can_be_written_again(kind):
    caches, layers = fed(kind, 150), Layers(Caches(kind.make))
    layers.trim(caches, 37)
    assert length_of(layers, caches) == 37
    assert_equal(content(caches), content(fed(kind, 37)))
    feed(kind, caches, 37, 80, chunk=25)
    assert_equal(content(caches), content(fed(kind, 117)))


@pytest.mark.parametrize("kind", MIXED.values(), ids=MIXED)
def test_caches_can_be_put_back_to_where_their_state_was_kept(kind):
    caches, layers = fed(kind, 50), Layers(Caches(kind.make))
    state = layers.state(caches)
    feed(kind, caches, 50, 70, chunk=7)
    layers.set_state(caches, state)
    layers.trim(caches, 50)
    assert_equal(content(caches), content(fed(kind, 50)))
    expected = fed(kind, 50)
    for cache_list in (caches, expected):
        feed(kind, cache_list, 50, 20)
    assert_equal(content(caches), content(expected))


# ------------------------------------------------------------------------------------------ nobody's snapshot


@pytest.mark.parametrize("chunk", [1, 60])
@pytest.mark.parametrize("kind", (SLICED | WHOLE | MIXED).values(), ids=SLICED | WHOLE | MIXED)
def test_what_is_kept_does_not_change_when_the_source_goes_on(kind, chunk):
    caches, layers = fed(kind, 40), Layers(Caches(kind.make))
    cut, state = layers.cut(caches, 10, 40), layers.state(caches)
    before = arrays_of(cut.leaves), arrays_of(state.leaves)
    feed(kind, caches, 40, 60, chunk)
    layers.trim(caches, 12)
    feed(kind, caches, 80, 60, chunk)
    assert_equal(arrays_of(cut.leaves), before[0])
    assert_equal(arrays_of(state.leaves), before[1])


@pytest.mark.parametrize("chunk", [1, 60])
@pytest.mark.parametrize("kind", (SLICED | WHOLE | MIXED).values(), ids=SLICED | WHOLE | MIXED)
def test_two_restores_of_one_snapshot_do_not_disturb_each_other_or_the_snapshot(kind, chunk):
    source, layers = fed(kind, 40), Layers(Caches(kind.make))
    cut, state = layers.cut(source, 0, 40), layers.state(source)
    before = arrays_of(cut.leaves), arrays_of(state.leaves)
    first, second = (layers.assemble([cut], state, 40) for _ in range(2))
    feed(kind, first, 100, 60, chunk)
    assert_equal(content(second), content(source))
    feed(kind, second, 200, 60, chunk)
    assert_equal(arrays_of(cut.leaves), before[0])
    assert_equal(arrays_of(state.leaves), before[1])
    assert_equal(content(layers.assemble([cut], state, 40)), content(source))


@pytest.mark.parametrize("kind", SLICED.values(), ids=SLICED)
def test_a_copy_of_a_view_does_not_change_when_its_source_goes_on(kind):
    source, layers = fed(kind, 40), Layers(Caches(kind.make))
    copy = layers.assemble([layers.view(source, 0, 40)], None, 40)
    feed(kind, copy, 100, 3, chunk=1)
    feed(kind, source, 40, 3, chunk=1)
    layers.trim(copy, 40)
    assert_equal(content(copy), content(fed(kind, 40)))
    assert_equal(content(source), content(fed(kind, 43)))


# ----------------------------------------------------------------------------------------------------- memory


SLACK = 2_000 + rounded_up_bytes()
"""Allocators round up."""


@pytest.mark.sample(2)
@pytest.mark.parametrize("heads", [1, 4])
def test_a_page_does_not_keep_the_caches_alive_that_it_was_cut_from(heads):
    kind = Kind(lambda: [KVCache()], Feeder(heads, key=256, value=128))
    before = active_bytes()
    caches, layers = fed(kind, 390), Layers(Caches(kind.make))
    held = layers.nbytes(caches)
    cut = layers.cut(caches, 64, 128)
    del caches
    assert cut.nbytes < held / 5
    assert active_bytes() - before < cut.nbytes + SLACK


@pytest.mark.thorough
@pytest.mark.checked(2)
@pytest.mark.parametrize("heads", [1, 4])
def test_a_state_does_not_keep_the_window_alive_that_a_long_chunk_left_after(heads):
    kind = Kind(lambda: [RotatingKVCache(WINDOW)], Feeder(heads, key=256, value=128))
    before = active_bytes()
    caches, layers = fed(kind, 390), Layers(Caches(kind.make))
    assert layers.nbytes(caches) > 10 * (heads * 384 * 4 * WINDOW)
    state = layers.state(caches)
    del caches
    assert state.nbytes == heads * 384 * 4 * WINDOW
    assert active_bytes() - before < state.nbytes + SLACK


@pytest.mark.thorough
@pytest.mark.checked(2)
@pytest.mark.parametrize("length", [3000, 12])
def test_a_state_does_not_keep_what_it_is_a_slice_of(length):
    """Nor if little would be saved (lesson 21)."""
    before = active_bytes()
    caches = [ArraysCache(1)]
    caches[0][0] = mx.array(random_numbers(1, length, 64))[:, -3:]
    mx.eval(caches[0].state)
    state = Layers(Caches(lambda: [ArraysCache(1)])).state(caches)
    del caches
    assert active_bytes() - before < state.nbytes + SLACK


@pytest.mark.thorough
@pytest.mark.checked(2)
@pytest.mark.parametrize("heads", [1, 2])
def test_settled_caches_are_computed_and_let_go_of_the_batch_that_they_are_slices_of(heads):
    kind = Kind(lambda: [RotatingKVCache(500), ArraysCache(1), KVCache()], Feeder(heads, key=256, value=128))
    before = active_bytes()
    sequences = [fed(kind, 390) for _ in range(4)]
    merged = [type(layer[0]).merge(list(layer)) for layer in zip(*sequences, strict=True)]
    mx.eval([layer.state for layer in merged])
    expected = content(sequences[0])
    caches = [layer.extract(0) for layer in merged]
    layers = Layers(Caches(kind.make))
    materialize(caches)
    del sequences, merged
    assert active_bytes() - before < layers.nbytes(caches) + 10 * SLACK
    assert_equal(content(caches), expected)


def test_fresh_and_settled_caches_of_nothing_take_no_bytes():
    layers = Layers(Caches(lambda: [KVCache(), ArraysCache(2), RotatingKVCache(8), ChunkedKVCache(8)]))
    caches = layers.fresh()
    materialize(caches)
    assert (layers.nbytes(caches), layers.token_bytes(caches), length_of(layers, caches)) == (0, 0, 0)


def test_bytes_are_those_of_all_leaves_and_of_the_sliced_ones():
    kind = Kind(lambda: [CacheList(ArraysCache(2), KVCache())], LATENT)
    caches, layers = fed(kind, 300), Layers(Caches(kind.make))
    sliced, whole = 512 * (48 + 16) * 4, 2 * 48 * 4
    assert layers.nbytes(caches) == sliced + whole, "the room that is left counts"
    assert layers.token_bytes(caches) == (48 + 16) * 4
    assert layers.cut(caches, 0, 100).nbytes == 100 * (48 + 16) * 4
    assert (layers.state(caches).nbytes, layers.state(caches).arrays) == (whole, 2)


# -------------------------------------------------------------------------------------------- kinds of leaves


def test_caches_that_no_sequence_describes_are_reported():
    layers = Layers(
        Caches(
            lambda: [
                KVCache(),
                ConcatenateKVCache(),
                CacheList(KVCache(), BatchKVCache([0])),
                RotatingKVCache(8, keep=4),
                RotatingKVCache(8),
                ConcatenateKVCache(),
            ]
        )
    )
    assert layers.unknown == ["BatchKVCache", "ConcatenateKVCache", "RotatingKVCache(keep=4)"]


@pytest.mark.parametrize(
    ("make", "has_trimmable", "has_state"),
    [
        (lambda: [KVCache(), KVCache()], True, False),
        (lambda: [RotatingKVCache(8), KVCache()], True, True),
        (lambda: [CacheList(ArraysCache(1), KVCache())], True, True),
        (lambda: [ArraysCache(1), RotatingKVCache(8), ChunkedKVCache(8)], False, True),
    ],
)
def test_what_a_network_needs_follows_from_its_caches(make, has_trimmable, has_state):
    layers = Layers(Caches(make))
    assert (layers.unknown, layers.has_trimmable, layers.has_state) == ([], has_trimmable, has_state)


VOCABULARY = 300
SMALL = {"hidden_size": 64, "vocab_size": VOCABULARY, "num_attention_heads": 4, "intermediate_size": 64}
MULTI_LATENT = {"kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
MULTI_LATENT |= {"v_head_dim": 16, "n_routed_experts": 4}
NETWORKS: dict[str, dict[str, Any]] = {
    "deepseek_v32": SMALL | MULTI_LATENT | {"num_key_value_heads": 4, "num_hidden_layers": 2}
    | {"index_head_dim": 32, "index_n_heads": 2, "index_topk": 24, "moe_intermediate_size": 32}
    | {"n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "falcon_h1": SMALL | {"num_key_value_heads": 2, "num_hidden_layers": 2, "head_dim": 16}
    | {"mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 16, "mamba_n_heads": 4}
    | {"mlp_multipliers": [1.0, 1.0], "ssm_multipliers": [1.0] * 5, "lm_head_multiplier": 1.0},
    "llama4": {"text_config": SMALL | {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 16}
    | {"attention_bias": False, "attention_chunk_size": 32, "interleave_moe_layer_step": 1}
    | {"intermediate_size_mlp": 64, "max_position_embeddings": 1000, "model_type": "llama4_text"}
    | {"num_experts_per_tok": 1, "num_local_experts": 2, "rms_norm_eps": 1e-6, "rope_scaling": None}
    | {"rope_theta": 1e4, "use_qk_norm": True, "attn_temperature_tuning": 4, "floor_scale": 8192}
    | {"attn_scale": 0.1}},
    "longcat_flash_ngram": SMALL | MULTI_LATENT | {"ffn_hidden_size": 128, "moe_topk": 2, "num_layers": 2}
    | {"expert_ffn_hidden_size": 32, "zero_expert_num": 2, "max_position_embeddings": 1000}
    | {"routed_scaling_factor": 1.0, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "ngram_vocab_size_ratio": 3}
    | {"mla_scale_q_lora": True, "mla_scale_kv_lora": True},
    "mamba2": SMALL | {"num_heads": 4, "head_dim": 32, "state_size": 16, "num_hidden_layers": 2}
    | {"intermediate_size": 128, "layer_norm_epsilon": 1e-5, "conv_kernel": 4, "n_groups": 1}
    | {"use_bias": False, "use_conv_bias": True, "tie_word_embeddings": True, "time_step_rank": 4}
    | {"time_step_limit": (0.0, 100.0)},
    "recurrent_gemma": SMALL | {"num_key_value_heads": 1, "num_hidden_layers": 3, "attention_bias": False}
    | {"intermediate_size": 128, "conv1d_width": 4, "logits_soft_cap": 30.0, "rms_norm_eps": 1e-6}
    | {"rope_theta": 1e4, "attention_window_size": 32}
    | {"block_types": ["recurrent", "recurrent", "attention"]},
}  # fmt: skip
"""One of mlx_lm's networks for each mixture of caches that the tiny models on disk do not have."""


@pytest.mark.thorough
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_goes_on_from_a_restored_position_as_if_it_had_computed_it(name):
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(1)
    network = module.Model(module.ModelArgs.from_dict({"model_type": name} | NETWORKS[name]))
    layers = Layers(network)
    assert layers.unknown == []
    ids = mx.random.randint(0, VOCABULARY, (1, 120))
    computed = np.array(network(ids, cache=layers.fresh())[0, -1])
    for length in (1, 20, 40, 119):
        caches = layers.fresh()
        network(ids[:, :length], cache=caches)
        mx.eval([layer.state for layer in caches])
        copy = restored(layers, caches, length)
        network(ids[:, :5], cache=caches)  # the source goes another way
        mx.eval([layer.state for layer in caches])
        logits = np.array(network(ids[:, length:], cache=copy)[0, -1])
        assert np.abs(logits - computed).max() < 1e-4 * np.abs(computed).max()


# -------------------------------------------------------------------------------------- taken apart, and room


@pytest.mark.parametrize("kind", [pytest.param(kind, id=name) for name, kind in (SLICED | MIXED).items()])
def test_what_is_taken_apart_is_what_would_be_cut_and_the_caches_are_empty(kind):
    caches, layers = fed(kind, 70), Layers(Caches(kind.make))
    spans = [(0, 20), (20, 40), (52, 70)]
    expected = [layers.cut(caches, start, end) for start, end in spans]
    pieces = layers.give_up(caches)
    for (start, end), cut in zip(spans, expected, strict=True):
        assert_parts_equal(pieces.part(start, end), cut)
    assert length_of(layers, caches) in (None, 0), "they are empty"
    assert layers.token_bytes(caches) == 0


@pytest.mark.parametrize("longest", [7, 64])
@pytest.mark.parametrize("kind", SLICED.values(), ids=SLICED)
def test_leaves_that_are_cut_one_by_one_hold_the_same_tokens_as_before(kind, longest, monkeypatch):
    monkeypatch.setattr(kept_arrays, "LONGEST_PIECE", longest)
    caches, layers = fed(kind, 70), Layers(Caches(kind.make))
    expected = layers.cut(caches, 12, 50)
    pieces = layers.give_up(caches)
    for first, last in ((5, 70), (12, 66), (12, 50)):
        for index in range(len(pieces)):
            pieces.keep(index, first, last)
            assert covers(pieces, first, last) and pieces.is_trimmed(index, first, last)
            assert_parts_equal(pieces.part(12, 50), expected)
    assert pieces.nbytes == expected.nbytes == pieces.bytes_of(12, 50)
    assert not covers(pieces, 11, 50) and not covers(pieces, 12, 51)
    for index in range(len(pieces)):
        pieces.keep(index, 0, 0)
    assert (pieces.nbytes, pieces.arrays) == (0, 0)


def assert_parts_equal(part: TokenRange, cut: KVSlice) -> None:
    """The same tokens, however many pieces they are in."""
    for index, leaf in enumerate(cut.leaves):
        columns = zip(*part.take(index), strict=True)
        assert_equal([np.array(joined(column)) for column in columns], arrays_of(leaf))


@pytest.mark.thorough
def test_caches_that_are_taken_apart_are_hardly_ever_there_twice():
    kind = Kind(lambda: [KVCache() for _ in range(16)], Feeder(4, key=128, value=128))
    before = active_bytes()
    caches, layers = fed(kind, 390), Layers(Caches(kind.make))
    held = active_bytes() - before
    mx.reset_peak_memory()
    pieces = layers.give_up(caches)
    for index in range(len(pieces)):
        pieces.keep(index, 32, 384)
    assert mx.get_peak_memory() - before < 1.2 * held
    assert active_bytes() - before < 1.05 * pieces.nbytes + SLACK


@pytest.mark.thorough
def test_caches_are_hardly_ever_there_twice_when_they_are_put_together():
    """The caches that they are copied from go leaf by leaf."""
    kind = Kind(lambda: [KVCache() for _ in range(16)], Feeder(4, key=128, value=128))
    before = active_bytes()
    layers = Layers(Caches(kind.make))
    pieces = layers.give_up(fed(kind, 390))
    held = active_bytes() - before
    mx.reset_peak_memory()
    copy = layers.assemble([pieces.part(0, 390)], None, 390, lambda index: pieces.keep(index, 0, 0))
    assert mx.get_peak_memory() - before < 1.2 * held
    assert pieces.nbytes == 0
    assert_equal(content(copy), content(fed(kind, 390)))


@pytest.mark.parametrize(
    ("name", "count"),
    [("plain", 4), ("a list", 4), ("recurrent and plain", 4), ("a window and plain", 4)],
)
def test_arrays_are_counted_wherever_they_lie(name, count):
    kind = (SLICED | MIXED)[name]
    caches, layers = fed(kind, 30), Layers(Caches(kind.make))
    assert layers.arrays(layers.fresh()) == 0
    assert layers.arrays(caches) == count
    assert layers.cut(caches, 0, 10).arrays + layers.state(caches).arrays == count


@pytest.mark.parametrize("room", [16, 64, 256])
@pytest.mark.parametrize("kind", [SLICED["plain"], SLICED["latent"], MIXED["a window and plain"]])
def test_caches_grow_by_their_room(kind, room):
    layers = Layers(Caches(kind.make), room)
    caches = layers.fresh()
    sizes: list[int] = []
    for done in range(room + 1):
        feed(kind, caches, done, 1)
        sizes.append(sum(leaf.nbytes for leaf in leaves(caches) if isinstance(leaf, KVCache)))
    token = layers.cut(caches, 0, 1).nbytes
    assert sizes[:room] == [room * token] * room
    assert sizes[room] == 2 * room * token


# ------------------------------------------------------------------------------------------------------- room


def rooms(caches: list[Any]) -> list[int]:
    """Tokens that sliced leaves have arrays for."""
    sliced = [leaf for leaf in leaves(caches) if isinstance(leaf, KVCache)]
    return [arrays_of(leaf.keys)[0].shape[-2] for leaf in sliced]


@pytest.mark.parametrize("kind", [pytest.param(kind, id=name) for name, kind in (SLICED | MIXED).items()])
@pytest.mark.parametrize("way", ["fresh", "put together", "handed over"])
def test_caches_have_the_room_that_is_asked_for_and_then_grow_by_little(kind, way):
    layers, done = Layers(Caches(kind.make), 16), 0 if way == "fresh" else 50
    match way:
        case "fresh":
            caches = layers.fresh(300)
        case "put together":
            source = fed(kind, 50)
            state = layers.state(source) if layers.has_state else None
            caches = layers.assemble([layers.cut(source, 0, 50)], state, 50, room=300)
        case _:
            caches = fed(kind, 50)
            layers.reserve(caches, 300)
    for start in range(done, 300, 50):
        feed(kind, caches, start, 50)
        layers.grow_in_small_steps(caches)
        assert {*rooms(caches)} == {layers.room(caches)} == {300}
    assert_equal(content(caches), content(fed(kind, 300, 50)))
    feed(kind, caches, 300, 5)
    assert layers.room(caches) <= 300 + 300 // 16 + 16


@pytest.mark.parametrize("kind", SLICED.values(), ids=SLICED)
def test_of_room_that_is_not_used_little_stays_with_caches_at_rest(kind):
    layers = Layers(Caches(kind.make), 16)
    for room, left in ((300, 200), (210, 210)):
        caches = fed(kind, 200)
        layers.compact(caches)
        layers.reserve(caches, room)
        layers.compact(caches)
        assert layers.room(caches) == left
        assert_equal(content(caches), content(fed(kind, 200)))


def test_a_recurrent_state_is_not_taken_back():
    layers = Layers(Caches(lambda: [ArraysCache(2)]))
    caches = layers.fresh()
    caches[0].cache = [mx.ones((1, 4)), mx.ones((1, 4))]
    with pytest.raises(ValueError, match="cannot be taken back"):
        layers.state(caches, ahead=1)
