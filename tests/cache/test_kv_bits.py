"""Pages at rest can be quantised: what that saves, what it loses, and that it is lost once."""

from __future__ import annotations

import random
from math import gcd
from pathlib import Path
from statistics import fmean
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache

from start_llm.cache.arrays import LONGEST_PIECE, Arrays
from start_llm.cache.disk.page_file import FileHeader, opened_file
from start_llm.cache.eviction import EvictionLimits
from start_llm.cache.kv_format import KVFormat, LayerFormat, MixedKVFormat, PageFormat, first_quantized
from start_llm.cache.layers import Layers
from start_llm.cache.prompt_cache import PromptCache
from start_llm.cache.quantize.packing import pack, packed_bytes, unpack
from start_llm.cache.quantize.quantizer import KVQuantizer
from start_llm.cache.quantize.rotated import RotatedCodec, _rotated, _rotated_back, upper_levels
from start_llm.config.paths import DEMO_MODEL, ROOT
from start_llm.core.events import Finished
from start_llm.engine.resources import EngineResources
from start_llm.models.loader import load
from start_llm.telemetry.metrics import CacheMetrics
from tests.cache.conversations import PAGE, Cached, memory_for, tokens
from tests.cache.disk import OnDisk, settled
from tests.cache.integrity import check_cache, covers
from tests.cache.quantised_prompts import behind, divergence, interrupted, log_probabilities, packed_runs
from tests.cache.test_layers import Caches
from tests.conftest import TinyModel
from tests.engine.harness import uncached_resources

EIGHT, FOUR = KVFormat(8, 64, 0), KVFormat(4, 64, 0)
TURBO, TURBO_SMALL = KVFormat(4, 64, 0, "turboquant"), KVFormat(3.5, 64, 0, "turboquant")
MIXED = MixedKVFormat(((0, LayerFormat(8, 64)), (1, LayerFormat(4, 32))), 0)
TYPES = [mx.float32, mx.bfloat16, mx.float16]
WIDTHS = [64, 96, 128, 16, 20]


def uneven(width: int, kind: mx.Dtype) -> mx.array:
    """[1, 2, 40, width]: channels and tokens of very different size, and groups of nothing but 0."""
    rng = np.random.default_rng(width)
    values = rng.normal(size=(1, 2, 40, width))
    values *= np.exp(2 * rng.normal(size=(1, 2, 1, width))) * np.exp(2 * rng.normal(size=(1, 2, 40, 1)))
    values[:, :, 7] = 0
    return mx.array(np.clip(values, -3e4, 3e4).astype(np.float32)).astype(kind)


def there_and_back(form: KVFormat, array: mx.array, *, as_keys: bool = False) -> tuple[Arrays, mx.array]:
    """What is stored of `array`, and what is restored of it; with `as_keys` it is the keys of a layer."""
    leaf = (array, array[..., :8]) if as_keys else (array,)
    quantizer = KVQuantizer.of(form, [leaf])
    packed = quantizer.packed(0, leaf)
    return packed[:2], quantizer.unpacked(0, packed)[0]


def as_numpy(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


# ----------------------------------------------------------------------------------------------- one array


@pytest.mark.parametrize("form", [EIGHT, FOUR, KVFormat(8, 32, 0), KVFormat(4, 128, 0)])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("as_keys", [False, True])
def test_what_was_restored_is_quantised_again_without_a_loss(form, kind, width, as_keys):
    packed, once = there_and_back(form, uneven(width, kind), as_keys=as_keys)
    again, twice = there_and_back(form, once, as_keys=as_keys)
    assert (once.dtype, once.shape) == (kind, (1, 2, 40, width))
    assert all(mx.array_equal(first, second) for first, second in zip(packed, again, strict=True))
    assert mx.array_equal(once, twice)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("bits", "most"), [(8, 127), (8, 255), (4, 7)])
@pytest.mark.parametrize("power", [-9, 0, 5])
def test_every_code_survives_behind_every_largest_number(bits, most, kind, power):
    """All mantissas of bfloat16 and float16, and as many of float32; with one of each code in the group."""
    largest = 2.0**power * (1 + np.arange(1024) / 1024)
    array = mx.array(np.outer(largest, np.arange(-most, most + 2) / most)).astype(kind)[None, None]
    array[..., -1] = array[..., 0]
    form = KVFormat(bits, array.shape[-1], 0)
    packed, once = there_and_back(form, array, as_keys=most == 255)
    again, twice = there_and_back(form, once, as_keys=most == 255)
    if kind == mx.float32:
        assert len({*np.unique(as_numpy(once)[0, 0, 3])}) == 2 * most + 1, "no two codes are one number"
    assert all(mx.array_equal(first, second) for first, second in zip(packed, again, strict=True))
    assert mx.array_equal(once, twice)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("form", "as_keys"), [(EIGHT, False), (EIGHT, True), (FOUR, False)])
@pytest.mark.parametrize(("kind", "mantissas"), [(mx.bfloat16, 128), (mx.float16, 1024)])
def test_every_number_of_a_short_type_is_lost_once(form, as_keys, kind, mantissas):
    """Behind each largest number (of float16, every eighth): all that are not close to 0."""
    numbers = np.outer(2.0 ** np.arange(-10, 1), 1 + np.arange(mantissas) / mantissas).ravel()
    largest = numbers[-mantissas :: mantissas // 128, None]
    groups = mx.array(np.minimum(numbers, largest)).astype(kind)[None, None]
    form = KVFormat(form.bits, groups.shape[-1], 0)
    packed, once = there_and_back(form, groups, as_keys=as_keys)
    again, twice = there_and_back(form, once, as_keys=as_keys)
    assert all(mx.array_equal(first, second) for first, second in zip(packed, again, strict=True))
    assert mx.array_equal(once, twice)


@pytest.mark.parametrize(("form", "as_keys"), [(EIGHT, False), (EIGHT, True), (FOUR, False)])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_no_element_is_further_off_than_half_a_step(form, as_keys, kind, width):
    """And half of what a short type tells apart."""
    most = 7 if form is FOUR else 255 if as_keys and width % 8 == 0 else 127
    share = 0.501 / most + (0 if kind == mx.float32 else 2**-8)
    array = uneven(width, kind)
    restored = as_numpy(there_and_back(form, array, as_keys=as_keys)[1]).reshape(
        1, 2, 40, -1, gcd(width, form.group_size)
    )
    groups = as_numpy(array).reshape(restored.shape)
    assert (np.abs(restored - groups) <= share * np.abs(groups).max(axis=-1, keepdims=True)).all()
    assert (restored[:, :, 7] == 0).all()


@pytest.mark.parametrize(
    ("form", "kind", "width", "share"),
    [
        (EIGHT, mx.bfloat16, 64, 0.5157),
        (EIGHT, mx.bfloat16, 128, 0.5157),
        (EIGHT, mx.float32, 128, 0.2657),
        (FOUR, mx.bfloat16, 128, 0.2657),
        (FOUR, mx.float32, 128, 0.1407),
        (KVFormat(8, 32, 0), mx.bfloat16, 128, 0.5313),
        (EIGHT, mx.bfloat16, 96, 0.5313),
    ],
)
def test_stored_bytes_are_this_share_of_the_exact_ones(form, kind, width, share):
    array = uneven(width, kind)
    for leaf, more in (((array,), 0), ((array, array), 1 / 2 / 8 / array.itemsize if form.bits == 8 else 0)):
        quantizer = KVQuantizer.of(form, [leaf])
        nbytes = sum(part.nbytes for part in quantizer.packed(0, leaf))
        assert nbytes / sum(part.nbytes for part in leaf) == pytest.approx(share + more, abs=1e-4)
        assert nbytes == 40 * quantizer.token_bytes(0)


@pytest.mark.parametrize("kind", TYPES)
def test_at_8_bits_and_the_default_groups_a_layer_takes_at_most_this_of_its_bytes(kind):
    leaf = (uneven(128, kind), uneven(128, kind))
    packed = KVQuantizer.of(EIGHT, [leaf]).packed(0, leaf)
    assert sum(part.nbytes for part in packed) <= 0.55 * sum(array.nbytes for array in leaf)


def test_arrays_that_are_quantised_already_or_have_half_bytes_stay_as_they_are():
    codes = mx.zeros((1, 2, 40, 8), mx.uint32)
    odd = mx.ones((1, 2, 40, 7))
    for leaf in ((codes, odd[..., :4]), (odd,)):
        quantizer = KVQuantizer.of(FOUR, [leaf])
        assert not quantizer.quantizes(0)
        assert quantizer.packed(0, leaf) is leaf
        assert quantizer.unpacked(0, leaf) is leaf


# -------------------------------------------------------------------------------------------- rotated rows


def odd_rows(width: int, kind: mx.Dtype) -> mx.array:
    """[1, 6, 300, width]: what a rotation may meet, in heads of different kinds.

    Normal and heavy-tailed rows, rows with single channels, with one magnitude, with all of their size along
    one column of the rotation, and with sizes down to nothing.
    """
    rng = np.random.default_rng(width)
    shape = (300, width)
    column = np.arange(width) == rng.integers(width, size=(300, 1))
    along = np.array(_rotated_back(mx.array(np.where(column, 1, 1e-3 * rng.normal(size=shape)), mx.float32)))
    heads = [
        rng.normal(size=shape),
        np.clip(rng.standard_t(1, size=shape), -100, 100),
        np.where(column, rng.normal(size=shape), 0),
        rng.choice([-1.0, 1.0], size=shape) * np.exp(rng.normal(size=(300, 1))),
        along * np.exp(rng.normal(size=(300, 1))),
        rng.normal(size=shape) * 2.0 ** rng.integers(-26, -6, size=(300, 1)),
    ]
    return mx.array(np.stack(heads)[None].astype(np.float32)).astype(kind)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("width", [*WIDTHS, 256, 80, 512, 7, 2])
@pytest.mark.sample(24)
def test_a_restored_row_is_rotated_and_quantised_to_the_same_bytes(bits, kind, width):
    codec = RotatedCodec(kind, width, 6, bits)
    packed = codec.packed(odd_rows(width, kind))
    once = codec.restored(*packed)
    again = codec.packed(once)
    assert (once.dtype, once.shape) == (kind, (1, 6, 300, width))
    assert all(mx.array_equal(first, second) for first, second in zip(packed, again, strict=True))
    assert mx.array_equal(codec.restored(*again), once)
    assert sum(part.nbytes for part in packed) == 300 * codec.token_bytes


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("width", [64, 80, 96, 128, 256, 512])
@pytest.mark.parametrize(("bits", "most"), [(2, 0.32), (3, 0.055), (4, 0.013), (5, 0.0035), (6, 0.0011)])
def test_rotated_rows_lose_this_share_of_their_energy_whatever_their_channels_are(width, kind, bits, most):
    array = uneven(width, kind)
    exact = as_numpy(array)
    lost = as_numpy(
        RotatedCodec(kind, width, 2, bits).restored(*RotatedCodec(kind, width, 2, bits).packed(array))
    )
    assert ((lost - exact) ** 2).sum() <= most * (exact**2).sum()
    assert (lost[:, :, 7] == 0).all(), "rows of nothing but 0"


@pytest.mark.parametrize("width", [64, 96, 20, 7])
def test_a_rotation_keeps_lengths_and_its_inverse_gives_the_row_back(width):
    rows = uneven(width, mx.float32)
    turned = _rotated(rows)
    assert np.allclose(mx.linalg.norm(turned, axis=-1), mx.linalg.norm(rows, axis=-1), rtol=1e-5)
    assert np.allclose(_rotated_back(turned), rows, rtol=1e-4, atol=1e-4 * float(mx.abs(rows).max()))
    assert not np.allclose(turned[..., :2], rows[..., :2])


@pytest.mark.thorough
@pytest.mark.parametrize(("width", "bits"), [(64, 3), (128, 4), (256, 6)])
def test_levels_are_those_with_the_least_error_for_rows_of_a_normal_distribution(width, bits):
    """Beside even steps; and no single level can be moved to a better place."""
    rows = np.abs(np.random.default_rng(1).normal(size=(1000, width)))
    largest = rows.max(axis=1, keepdims=True)

    def error(levels: np.ndarray) -> float:
        bounds = (levels[1:] + levels[:-1]) / 2
        return float(((levels[np.searchsorted(bounds, rows / largest)] * largest - rows) ** 2).mean())

    levels = np.array(upper_levels(width, bits))
    assert levels[-1] == 1
    assert error(levels) < 0.9 * error(np.arange(1, 2**bits, 2) / (2**bits - 1))
    for place, step in enumerate(np.diff(levels)):
        for share in (-0.4, 0.4):
            moved = levels.copy()
            moved[place] += share * step
            assert error(moved) > error(levels)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8, 9])
@pytest.mark.parametrize("width", [16, 20, 7])
def test_codes_of_any_bits_are_read_as_they_were_written(bits, width):
    codes = mx.array(np.random.default_rng(bits).integers(2**bits, size=(3, 5, width)), mx.uint16)
    data = pack(codes, bits)
    assert data.shape == (3, 5, packed_bytes(width, bits))
    assert packed_bytes(16, bits) == 2 * bits
    assert mx.array_equal(unpack(data, bits, width), codes)


@pytest.mark.parametrize(
    ("form", "width", "share"),
    [
        (TURBO, 64, 0.297),
        (TURBO, 128, 0.29),
        (TURBO, 256, 0.286),
        (TURBO_SMALL, 64, 0.2657),
        (TURBO_SMALL, 256, 0.2539),
    ],
)
def test_turboquant_takes_this_share_of_the_bytes_of_bfloat16(form, width, share):
    leaf = (uneven(width, mx.bfloat16), uneven(width, mx.bfloat16))
    quantizer = KVQuantizer.of(form, [leaf])
    nbytes = sum(part.nbytes for part in quantizer.packed(0, leaf))
    assert nbytes == 40 * quantizer.token_bytes(0)
    assert nbytes / sum(array.nbytes for array in leaf) == pytest.approx(share, abs=1e-3)


def test_turboquant_leaves_alone_what_are_no_plain_keys_and_values():
    codes, plain = mx.zeros((1, 2, 40, 8), mx.uint32), mx.ones((1, 2, 40, 64))
    for leaf in ((codes, plain), (plain,), (plain, plain, plain)):
        assert not KVQuantizer.of(TURBO, [leaf]).quantizes(0)


# ---------------------------------------------------------------------------------------------- bits by layer


def test_each_layer_has_its_own_bits_and_others_stay_exact():
    layers, caches = fed(300, layers=3)
    form = MixedKVFormat(((0, LayerFormat(8, 64)), (2, LayerFormat(4, 32))), 0)
    exact = layers.cut(caches, 0, 300)
    assert layers.quantize_pages(form, caches)
    page = layers.page(layers.borrow(caches, 0, 300), 0)
    back = layers.cut(layers.assemble([page], None, 300), 0, 300)
    wanted = [there_and_back(EIGHT, exact.leaves[0][1])[1], exact.leaves[1][1]]
    wanted.append(there_and_back(KVFormat(4, 32, 0), exact.leaves[2][1])[1])
    assert [len(leaf) for leaf in page.leaves] == [4, 2, 4]
    assert all(mx.array_equal(actual[1], array) for actual, array in zip(back.leaves, wanted, strict=True))
    at_rest = layers.kv_at_rest(caches)
    assert (at_rest.mode, at_rest.layers) == ("mixed (kv_config.json)", {"kv8": 1, "bf16": 1, "kv4": 1})


def test_a_layer_is_counted_by_its_place_in_the_network_not_among_those_that_can_be_quantised():
    network = Caches(lambda: [RotatingKVCache(max_size=32), KVCache()])
    layers = Layers(network)
    caches = layers.fresh()
    for cache in caches:
        cache.update_and_fetch(mx.ones((1, 2, 30, 64)), mx.ones((1, 2, 30, 64)))
    assert not layers.quantize_pages(MixedKVFormat(((0, LayerFormat(8, 64)),), 0), caches)
    assert layers.quantize_pages(MixedKVFormat(((1, LayerFormat(8, 64)),), 0), caches)
    assert layers.kv_at_rest(caches).layers == {"f32": 1, "kv8": 1}


# --------------------------------------------------------------------------------------------- runs of pages


def fed(count: int, layers: int = 2) -> tuple[Layers, list[Any]]:
    """Caches of `layers` layers that hold `count` tokens."""
    network = Caches(lambda: [KVCache() for _ in range(layers)])
    made = Layers(network)
    caches = made.fresh()
    rng = np.random.default_rng(3)
    for cache in caches:
        keys, values = (
            mx.array(rng.normal(size=(1, 2, count, 64)).astype(np.float32)).astype(mx.bfloat16)
            for _ in range(2)
        )
        cache.update_and_fetch(keys, values)
    mx.eval([cache.state for cache in caches])
    return made, caches


@pytest.mark.parametrize("count", [700, LONGEST_PIECE + 300])
def test_a_run_is_exact_up_to_the_start_and_quantised_from_there(count):
    layers, caches = fed(count)
    exact = layers.cut(caches, 0, count)
    assert layers.quantize_pages(KVFormat(8, 64, 256), caches)
    pieces = layers.give_up(caches)
    before = pieces.nbytes
    for index in range(len(pieces)):
        assert not pieces.is_trimmed(index, 0, count)
        pieces.keep(index, 0, count)
        assert pieces.is_trimmed(index, 0, count)
    assert pieces.nbytes == pieces.bytes_of(0, count) < before
    assert covers(pieces, 0, count)
    restored = layers.cut(layers.assemble([pieces.part(0, count)], None, count), 0, count)
    for whole, back in zip(exact.leaves, restored.leaves, strict=True):
        for array, other, as_keys in zip(whole, back, (True, False), strict=True):
            assert mx.array_equal(array[..., :256, :], other[..., :256, :])
            assert not mx.array_equal(array[..., 256:, :], other[..., 256:, :])
            quantised = there_and_back(EIGHT, array, as_keys=as_keys)[1]
            assert mx.array_equal(quantised[..., 256:, :], other[..., 256:, :])


def test_a_quantised_run_can_be_cut_further_and_is_not_quantised_twice():
    layers, caches = fed(900)
    layers.quantize_pages(EIGHT, caches)
    pieces = layers.give_up(caches)
    for index in range(len(pieces)):
        pieces.keep(index, 0, 900)
    wanted = layers.cut(layers.assemble([pieces.part(300, 500)], None, 200), 0, 200)
    for index in range(len(pieces)):
        pieces.keep(index, 300, 500)
    assert pieces.nbytes == pieces.bytes_of(300, 500)
    actual = layers.cut(layers.assemble([pieces.part(300, 500)], None, 200), 0, 200)
    for leaf, other in zip(wanted.leaves, actual.leaves, strict=True):
        assert all(mx.array_equal(first, two) for first, two in zip(leaf, other, strict=True))


def test_the_format_is_in_the_key_of_every_page():
    def root(form: PageFormat | None) -> bytes:
        layers, caches = fed(40)
        assert form is None or layers.quantize_pages(form, caches)
        cache = PromptCache(
            layers,
            limits=EvictionLimits(budget_bytes=1),
            page_size=PAGE,
            metrics=CacheMetrics(),
            identity=b"model",
        )
        return cache._lookup.root(b"").key

    formats = [None, EIGHT, FOUR, KVFormat(8, 32, 0), KVFormat(8, 64, 256), TURBO, TURBO_SMALL, MIXED]
    formats += [MixedKVFormat(MIXED.layers[:1], 0), MixedKVFormat(MIXED.layers, 256)]
    assert len({root(form) for form in formats}) == len(formats)
    assert root(EIGHT) == root(EIGHT)


def test_a_start_inside_of_a_page_is_moved_to_the_next_one_and_the_first_page_is_never_quantised():
    assert [first_quantized(start, 256) for start in (0, 1, 256, 257, 5000)] == [256, 256, 256, 512, 5120]


# ------------------------------------------------------------------------------------------------ the engine


BOUNDS = {
    "qwen3": {"kv8": 1e-4, "kv4": 1e-1, "turbo4": 1e-1, "turbo3.5": 1e-1},
    "gemma3_text": {"kv8": 1e-5, "kv4": 2e-3, "turbo4": 2e-3, "turbo3.5": 2e-3},
    "qwen3_5": {"kv8": 1e-5, "kv4": 2e-3, "turbo4": 2e-3, "turbo3.5": 2e-3},
    "glm4_moe_lite": {"kv8": 1e-1, "kv4": 3.0, "turbo4": 3.0, "turbo3.5": 3.0},
}
"""Mean KL divergence in nats, by family and format, for random networks: those make the most of a difference.

They look at all tokens nearly alike, so errors in values count most, to which turboquant gives few bits.
Latent attention (glm4_moe_lite) is the most sensitive one; servers refuse to quantise it.
"""


@pytest.fixture(scope="module", params=BOUNDS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def resources(family: str, tiny_model: TinyModel) -> EngineResources:
    model = load(tiny_model(family, hidden=128, layers=2))
    return uncached_resources(
        model.network, model.tokenizer.token_bytes, frozenset(), max_sequences=4, batches=True
    )


@pytest.mark.thorough
@pytest.mark.parametrize("form", [EIGHT, FOUR, TURBO, TURBO_SMALL], ids=lambda form: form.mode)
def test_what_a_hit_says_is_within_the_bound_of_its_format(family, resources, form):
    prompt = tokens(random.Random(5), 10 * PAGE, 10 * PAGE)
    question = prompt + tokens(random.Random(6), 40, 40)
    exact, quantised = Cached(resources), Cached(resources, kv=form)
    for engine in (exact, quantised):
        interrupted(engine, prompt)
    sizes = [sum(run.stored.nbytes for run in packed_runs(engine)) for engine in (exact, quantised)]
    assert 0 < sizes[1] < 0.3 * sizes[0], "of float32"
    (known,) = {engine.cache.opener.peek(question, b"", ()).tokens for engine in (exact, quantised)}
    assert known >= 10 * PAGE - 2
    truth, measured = (log_probabilities(engine, question, known) for engine in (exact, quantised))
    assert not mx.array_equal(truth, measured), "nothing was quantised"
    assert divergence(truth, measured) <= BOUNDS[family][form.of_layer(0).name]


@pytest.mark.long
@pytest.mark.parametrize(("form", "most"), [(EIGHT, 1.5e-4), (FOUR, 2e-1), (TURBO, 3.5e-2)])
def test_a_model_that_was_trained_is_as_sure_as_before_of_a_text(form, most):
    """The demo model, each time behind 400 tokens of the license."""
    model = load(DEMO_MODEL)
    ids = tuple(model.tokenizer.encode((ROOT / "LICENSE").read_text(), as_document=False))
    resources = uncached_resources(
        model.network, model.tokenizer.token_bytes, frozenset(), max_sequences=1, batches=True
    )
    lost: list[float] = []
    for place in range(0, len(ids) - 480, len(ids) // 6):
        logprobs = [behind(resources, ids[place : place + 480], 400, kv) for kv in (None, form)]
        lost.append(divergence(*logprobs))
    assert len(lost) >= 5
    assert 0 < fmean(lost) <= most


@pytest.mark.parametrize("form", [EIGHT, TURBO, TURBO_SMALL, MIXED], ids=lambda form: form.mode)
@pytest.mark.sample(8)
def test_restoring_and_cutting_in_every_turn_loses_nothing_more(resources, form):
    engine = Cached(resources, kv=form)
    prompt = tokens(random.Random(5), 6 * PAGE, 6 * PAGE)
    seen: list[list[mx.array]] = []
    for _ in range(4):
        interrupted(engine, prompt)
        seen.append(
            [
                array
                for run in packed_runs(engine)
                for index in range(len(run.stored))
                for arrays in run.stored.part(0, 5 * PAGE).take(index)
                for array in arrays
            ]
        )
    assert seen[0]
    for later in seen[1:]:
        assert all(mx.array_equal(first, two) for first, two in zip(seen[0], later, strict=True))


@pytest.mark.thorough
@pytest.mark.checked(2)
def test_a_sequence_that_is_continued_in_place_is_exact(resources):
    plain, engine = Cached(resources), Cached(resources, kv=FOUR)
    prompt = tokens(random.Random(8), 150, 150)
    first = [variant.say(prompt, 6, (149,)) for variant in (plain, engine)]
    assert first[0].tokens == first[1].tokens
    longer = (*prompt, *first[0].tokens, 3, 4, 5)
    second = [variant.say(longer, 6, (len(longer) - 1,)) for variant in (plain, engine)]
    assert second[0].tokens == second[1].tokens
    assert engine.cached.reused_in_place == plain.cached.reused_in_place == 1


@pytest.mark.long
def test_many_conversations_keep_the_cache_in_order(resources):
    """With a small budget: pages are quantised, restored, evicted and cut all the time."""
    rng = random.Random(11)
    engine = Cached(
        resources, budget=2 * memory_for(resources, 300), kv=KVFormat(8, 64, first_quantized(40, PAGE))
    )
    prompts = [tokens(rng, 60, 200)]
    for _ in range(25):
        base = rng.choice(prompts[-4:])
        kept = rng.choice((len(base), rng.randint(20, len(base))))
        prompts.append(base[:kept] + tokens(rng, 5, 80))
        watched = engine.say(prompts[-1], boundaries=(kept, len(prompts[-1]) - 1))
        assert isinstance(watched.ending, Finished)
        engine.cache.tidy(60)
        check_cache(engine.cache)
    assert engine.cached.reused_tokens > 500
    assert engine.cached.evictions > 0


# -------------------------------------------------------------------------------------------------- the disk


def written(engine: OnDisk, prompt: tuple[int, ...]) -> None:
    interrupted(engine, prompt)
    engine.cache.disk.flush(10)
    settled(lambda: engine.disk.queue == 0)


def page_files(folder: Path) -> list[Path]:
    return sorted((folder / "pages").rglob("*.safetensors"))


@pytest.mark.parametrize("is_in_place", [True, False])
@pytest.mark.parametrize("form", [EIGHT, FOUR, KVFormat(8, 64, 3 * PAGE), TURBO, TURBO_SMALL, MIXED])
@pytest.mark.sample(24)
def test_the_disk_gives_what_memory_gives_to_the_bit(resources, tmp_path, form, is_in_place):
    prompt = tokens(random.Random(5), 6 * PAGE, 6 * PAGE)
    question = (*prompt, 1, 2, 3)
    first = OnDisk(resources, tmp_path, kv=form)
    try:
        written(first, prompt)
        known = first.cache.opener.peek(question, b"", ()).tokens
        assert packed_runs(first)
        memory = log_probabilities(first, question, known)
    finally:
        first.stop()
    second = OnDisk(resources, tmp_path, kv=form, is_in_place=is_in_place)
    try:
        settled(lambda: second.tier.worker.scanned.is_over)
        while wait := second.cache.disk.wait_for(question, b"", len(question), speed=1.0):
            settled(lambda wait=wait: second.cache.disk.collect() or wait.is_over)
        assert second.cache.opener.peek(question, b"", ()).tokens == known
        assert mx.array_equal(log_probabilities(second, question, known), memory)
    finally:
        second.stop()


@pytest.mark.sample(2)
def test_files_say_their_format_and_are_as_small_as_pages_in_memory(resources, tmp_path):
    form = KVFormat(8, 64, 2 * PAGE)
    sizes: dict[str, list[int]] = {}
    for name, kv in (("exact", None), ("quantised", form)):
        engine = OnDisk(resources, tmp_path / name, kv=kv)
        try:
            written(engine, tokens(random.Random(5), 6 * PAGE, 6 * PAGE))
        finally:
            engine.stop()
        headers = [_header(path) for path in page_files(tmp_path / name)]
        formats = {header.kv_format for header in headers}
        assert formats == ({""} if kv is None else {"", form.tag})
        sizes[name] = sorted(sum(tensor.nbytes for tensor in header.tensors.values()) for header in headers)
    assert sizes["quantised"][0] < 0.55 * sizes["exact"][0]


def _header(path: Path) -> FileHeader:
    with opened_file(path, "pages", bytes.fromhex(path.stem.partition("-")[2])) as opened:
        return opened.header


@pytest.mark.thorough
@pytest.mark.checked(2)
def test_pages_of_one_format_are_never_used_under_another(resources, tmp_path):
    prompt = tokens(random.Random(5), 6 * PAGE, 6 * PAGE)
    formats = [None, EIGHT, FOUR, KVFormat(8, 32, 0), KVFormat(8, 64, 2 * PAGE), TURBO, TURBO_SMALL, MIXED]
    for kv in formats:
        engine = OnDisk(resources, tmp_path, kv=kv)
        try:
            settled(lambda engine=engine: engine.tier.worker.scanned.is_over)
            assert engine.cache.disk.wait_for((*prompt, 1), b"", 300, speed=1.0) is None, (
                "pages of another format"
            )
            written(engine, prompt)
        finally:
            engine.stop()
        assert not engine.disk.rejected


# ----------------------------------------------------------------------------------------------------- off


def test_without_a_format_keys_and_files_are_what_they_were(resources):
    assert Cached(resources).cache._lookup.identity == b""
    assert Cached(resources, kv=EIGHT).cache._lookup.identity == EIGHT.tag.encode()
    assert b"kv_format" not in FileHeader("pages", b"k", b"p", (1,), {}).encoded()
