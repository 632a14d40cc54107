"""What is computed of a model beforehand is what it takes once it is loaded."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import save_model

from scripts import tiny_models
from scripts.model_types import build, config_of, model_types
from start_llm.cache.layers import Layers
from start_llm.core.errors import ModelError
from start_llm.core.model_listing import Machine
from start_llm.core.sequence_cost import SequenceCost, WindowCost
from start_llm.engine.cost import measure_sequence
from start_llm.engine.pacing import LONGEST_CHUNK
from start_llm.library import fit
from start_llm.library.fit import ModelShape, arithmetic, beside, report, shape_of
from start_llm.models.architecture import completed, is_supported
from start_llm.models.footprint import weights_bytes
from start_llm.models.layer_costs import LayerGroup, layer_groups, sequence_cost
from start_llm.models.loader import load
from start_llm.models.machines import GIB, gib
from start_llm.models.weight_files import (
    WeightBytes,
    bits_per_weight,
    routed_experts,
    weights_in,
    weights_of_size,
)
from tests.quantised import halve, quantise
from tests.vision.seeing import FAMILIES, folder_of, model_of

LENGTHS = (1, 100, 1000, 100_000)
NOT_KNOWN = frozenset(
    {
        *("baichuan_m1", "bailing_hybrid", "bailing_moe_linear", "bailing_moe_v3", "deepseek_v41", "gear"),
        *("iquestloopcoder", "kimi_k3", "longcat_flash", "longcat_flash_ngram", "minimax_m3_vl"),
        *("nanbeige", "nemotron-nas", "olmo_hybrid", "openelm", "plamo2", "recurrent_gemma", "rwkv7"),
    }
)
"""Model types that the arithmetic does not know, and says so."""


def config_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def tiny_shape(folder: Path) -> ModelShape:
    config = config_in(folder)
    return shape_of(folder.name, config, weights_in(folder, config))


def differences(computed: SequenceCost, measured: SequenceCost) -> list[float]:
    return [abs(computed.bytes_of(n) - measured.bytes_of(n)) / measured.bytes_of(n) for n in LENGTHS]


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
@pytest.mark.sample(16)
def test_weights_and_cache_of_every_family_are_those_of_the_loaded_model(family, tiny_model):
    folder = tiny_model(family)
    model = load(folder)
    shape = tiny_shape(folder)
    measured = measure_sequence(model.network, Layers(model.network).fresh())
    assert shape.weights.total == weights_bytes(model)
    assert max(differences(shape.cost, measured)) == 0, "the figures are whole numbers of the same arrays"
    assert shape.cost.state_bytes == measured.state_bytes
    assert shape.window == tiny_models.MAX_POSITIONS


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["affine", "mxfp4", "nvfp4", "halves"])
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
@pytest.mark.product
def test_on_a_cpu_the_weights_and_the_cache_are_those_of_the_converted_model(
    family: str, form: str, tiny_model, tmp_path: Path
):
    original, copy = tiny_model(family), tmp_path / "copy"
    folder = halve(original, copy) if form == "halves" else quantise(original, copy, mode=form, halves=True)
    model = load(folder, most_float32_bytes=10**12)
    shape = tiny_shape(folder).on(CPU)
    measured = measure_sequence(model.network, Layers(model.network).fresh())
    assert model.precision.is_converted
    assert shape.weights.total == weights_bytes(model) == model.precision.float32_bytes
    assert max(differences(shape.cost, measured)) == 0
    assert shape.bits == 32
    assert tiny_shape(folder).on(MACHINE) == tiny_shape(folder), "a GPU computes with the weights as they are"


def test_fit_shows_what_is_converted_and_counts_it(tiny_model, tmp_path: Path):
    shape = tiny_shape(quantise(tiny_model("qwen3", hidden=128, layers=2), tmp_path / "q", halves=True))
    assert shape.in_float32 is not None
    needed = shape.in_float32.weights.total
    assert needed > 4 * shape.weights.total
    lines = arithmetic(shape, CPU, report(shape, CPU))
    assert f"converted from {gib(shape.weights.total)}, 5 bits each" in "".join(lines)
    assert report(shape, CPU).weights_bytes == needed
    tight = replace(CPU, float32_bytes=needed - 1)
    assert report(shape, tight).weights_bytes == shape.weights.total
    assert "converted" not in "".join(arithmetic(shape, tight, report(shape, tight)))
    assert beside([shape, shape], CPU, 100).startswith("Beside each other they stay loaded: ")
    assert gib(2 * needed) in beside([shape, shape], CPU, 100)


def test_a_layer_of_other_bits_is_counted_with_its_own(tiny_model, tmp_path: Path):
    folder = quantise(tiny_model("qwen3", hidden=128, layers=2), tmp_path / "q")
    config = config_in(folder)
    weights = weights_in(folder, config).in_float32
    more = {**config["quantization"], "model.layers.0.mlp.up_proj": {"bits": 2, "group_size": 32}}
    doubled = weights_in(folder, {**config, "quantization": more}).in_float32
    assert weights and doubled
    width = config["intermediate_size"] * config["hidden_size"]
    assert doubled.total - weights.total == 4 * width


def test_of_weights_whose_sum_alone_is_known_the_float32_sum_follows_from_the_bits():
    known = {"quantization": {"group_size": 64, "bits": 4}, "torch_dtype": "bfloat16", "model_type": "qwen3"}
    weights = weights_of_size(45 * 10**8, known).in_float32
    assert weights and weights.total == 32 * 10**9
    assert weights_of_size(10**9, {"torch_dtype": "float32", "model_type": "qwen3"}).in_float32 is None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sample(12)
def test_weights_of_every_family_that_sees_are_those_of_the_loaded_model(family):
    model = model_of(family)
    shape = tiny_shape(folder_of(family))
    assert model.vision is not None
    assert shape.weights.tower == sum(array.nbytes for array in model.vision.parameters.values())
    assert shape.weights.total == weights_bytes(model)
    measured = measure_sequence(model.network, Layers(model.network).fresh())
    assert max(differences(shape.cost, measured)) == 0


@pytest.mark.thorough
@pytest.mark.checked(2)
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "qwen3_5_moe", "glm4_moe_lite", "deepseek_v3"])
def test_experts_by_the_config_are_those_of_the_files(family, tiny_model):
    folder = tiny_model(family)
    config = config_in(folder)
    read = weights_in(folder, config)
    assert read.experts > read.total // 3
    assert weights_of_size(read.total, config, read.number_bytes) == read
    experts = routed_experts(config)
    assert experts is not None
    assert tiny_shape(folder).active_bytes == read.total - read.embeddings - read.experts * 3 // 4
    assert experts.share == 0.25


def test_a_quantised_model_counts_scales_and_biases(tiny_model, tmp_path):
    model = load(tiny_model("qwen3"))
    nn.quantize(model.network, group_size=64, bits=4)
    save_model(tmp_path, model.network)
    config = {**model.config, "quantization": {"group_size": 64, "bits": 4}}
    parameters = cast("list[tuple[str, mx.array]]", tree_flatten(model.network.parameters()))
    stored = sum(array.nbytes for _, array in parameters)
    assert weights_in(tmp_path, config).total == stored
    scales = 64 / 64  # float32 here, where the usual float16 makes half of that
    vectors = sum(array.nbytes for name, array in parameters if "norm" in name)
    matrices = tiny_shape(tiny_model("qwen3")).weights.total - vectors
    assert stored - vectors == pytest.approx(matrices * (4 + scales) / 32)
    assert bits_per_weight(config) == 4 + scales


@pytest.mark.parametrize("stored", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("stated", ["float32", "bfloat16", None])
@pytest.mark.sample(5)
def test_caches_are_of_the_type_of_the_weights_whatever_the_config_says(
    tiny_model, tmp_path, stored, bits, stated
):
    """Like `mlx_lm.convert`, which casts the weights and keeps `torch_dtype`."""
    model = load(tiny_model("qwen3"))
    model.network.set_dtype(stored)
    config = {**model.config, "torch_dtype": stated}
    if bits:
        nn.quantize(model.network, group_size=64, bits=bits)
        config["quantization"] = {"group_size": 64, "bits": bits}
    save_model(tmp_path, model.network)
    shape = shape_of("converted", config, weights_in(tmp_path, config))
    cache = make_prompt_cache(model.network)
    model.network(mx.array([[1, 2, 3, 4]]), cache=cache)
    kept = [array for layer in cache for array in (layer.keys, layer.values)]
    assert shape.cost.token_bytes == sum(array[..., :1, :].nbytes for array in kept)
    assert shape.bits == (4 + 16 * stored.size / 64 if bits else 8 * stored.size)


def test_a_quantised_half_precision_model_has_caches_of_half_the_size(tiny_model):
    config = {**config_in(tiny_model("qwen3")), "torch_dtype": "bfloat16"}
    groups = layer_groups(completed(config))
    assert sequence_cost(groups).token_bytes * 2 == tiny_shape(tiny_model("qwen3")).cost.token_bytes


# Importing some of mlx_lm's modules is slow, and a network of each is built and run.
@pytest.mark.thorough
@pytest.mark.parametrize("model_type", [*model_types()])
def test_the_cache_of_every_model_type_is_computed_rightly_or_not_at_all(model_type):
    config = {**config_of(model_type), "torch_dtype": "float32"}
    assert is_supported(config)
    if model_type in NOT_KNOWN:
        with pytest.raises(ModelError):
            layer_groups(completed(config))
        return
    network = build(model_type)
    measured = measure_sequence(network, Layers(network).fresh())
    assert max(differences(sequence_cost(layer_groups(completed(config))), measured)) <= 0.05


@pytest.mark.parametrize("model_type", ["mamba", "mamba2", "falcon_h1", "lfm2", "qwen3_5", "gemma3"])
@pytest.mark.sample(4)
def test_states_in_half_precision_are_computed_rightly(model_type):
    network = build(model_type)
    network.set_dtype(mx.bfloat16)
    config = {**config_of(model_type), "torch_dtype": "bfloat16"}
    measured = measure_sequence(network, Layers(network).fresh())
    assert max(differences(sequence_cost(layer_groups(completed(config))), measured)) <= 0.05


def test_the_longest_piece_of_a_prompt_is_the_engines():
    assert fit._CHUNK == LONGEST_CHUNK


# -------------------------------------------------------------------------------------------- the arithmetic

MACHINE = Machine(
    *("Toy 16 GB", "Toy", 16 * GIB, 10 * GIB), bandwidth_gbs=100, tflops=10, fuses_attention=True
)
CPU = Machine("Server 16 GB", "a CPU", 16 * GIB, 16 * GIB, float32_bytes=8 * GIB)
DENSE = ModelShape(
    name="dense",
    groups=(LayerGroup("full attention", 10, token_bytes=1000, formula="1000 bytes"),),
    weights=WeightBytes(5 * GIB, embeddings=GIB),
    window=100_000,
    transient_bytes=GIB // 2,
    bits=4.0,
    experts_share=1.0,
)
SPARSE = replace(DENSE, weights=WeightBytes(5 * GIB, experts=4 * GIB), experts_share=0.25)


def test_a_token_reads_the_active_weights_and_the_cache_once():
    estimate = report(DENSE, MACHINE, 1000)
    assert estimate.kv_bytes == 10_000_000
    assert estimate.read_bytes == 4 * GIB + 10_000_000
    assert estimate.decode_tps == pytest.approx(100e9 / estimate.read_bytes * 0.67, abs=0.05)
    assert estimate.prefill_tps == pytest.approx(10e12 / (2 * 4 * GIB * 2) * 0.55, abs=0.05)
    assert estimate.total_bytes == 5 * GIB + 10_000_000 + GIB // 2


def test_of_experts_a_token_reads_its_share():
    estimate = report(SPARSE, MACHINE, 1000)
    assert estimate.read_bytes == 2 * GIB + 10_000_000
    assert estimate.decode_tps == pytest.approx(100e9 / estimate.read_bytes * 0.35, abs=0.05)


def test_the_window_is_what_memory_leaves():
    left = int(10 * GIB * 0.95) - 5 * GIB - GIB // 2
    assert report(DENSE, MACHINE).context_tokens == min(left // 10_000, 100_000) == 100_000
    assert report(replace(DENSE, window=10**6), MACHINE).context_tokens == left // 10_000


@pytest.mark.parametrize(
    ("shape", "fits", "words"),
    [
        (DENSE, True, "fits, with all of its 100,000 tokens"),
        (replace(DENSE, window=10**6), True, "fits, with 429,496 of its 1,000,000 tokens"),
        (replace(DENSE, weights=WeightBytes(9 * GIB - GIB // 10)), False, "fits, but only 10,737 tokens"),
        (
            replace(DENSE, weights=WeightBytes(11 * GIB)),
            False,
            "does not fit: weights and computing need 11.5",
        ),
    ],
)
def test_the_verdict_in_words(shape, fits, words):
    estimate = report(shape, MACHINE, 12_000)
    assert estimate.verdict.startswith(words)
    assert estimate.fits is fits


def test_a_model_whose_states_do_not_fit_has_no_window():
    states = (LayerGroup("recurrent state", 1, state_bytes=20 * GIB),)
    assert report(replace(DENSE, groups=states), MACHINE).context_tokens == 0


def test_where_the_machine_is_not_known_nothing_is_said_of_speed():
    unknown = replace(MACHINE, bandwidth_gbs=None, tflops=None)
    estimate = report(DENSE, unknown)
    assert estimate.decode_tps is None
    assert estimate.prefill_tps is None
    assert estimate.fits
    assert "not known" in arithmetic(DENSE, unknown, estimate)[-1]


def test_the_arithmetic_shows_every_part():
    page = "\n".join(arithmetic(SPARSE, MACHINE, report(SPARSE, MACHINE)))
    for words in (
        "5.0 GiB",
        "of which a token reads 25.0%",
        "10 x full attention: 1000 bytes",
        "10,000 bytes a token",
    ):
        assert words in page
    for line in ("decode     100 GB/s / (2.0 GiB weights + 78.1 MiB cache) x 0.35", "prefill    10.0 TFLOPS"):
        assert line in page


def test_a_tower_takes_memory_and_no_time():
    seeing = replace(DENSE, weights=replace(DENSE.weights, total=6 * GIB, tower=GIB))
    estimate, blind = report(seeing, MACHINE), report(DENSE, MACHINE)
    assert estimate.total_bytes == blind.total_bytes + GIB
    assert (estimate.read_bytes, estimate.decode_tps) == (blind.read_bytes, blind.decode_tps)
    assert "1.0 GiB of them the vision tower" in "\n".join(arithmetic(seeing, MACHINE, estimate))


def test_models_stay_beside_each_other_if_each_has_room_for_a_prompt_of_its_window():
    small = replace(DENSE, weights=WeightBytes(2 * GIB))
    usable = int(10 * GIB * 0.95)
    together = 2 * 2 * GIB + 2 * 100_000 * 10_000 + GIB // 2
    assert together < usable
    assert beside([small, small], MACHINE, 10**6).startswith("Beside each other they stay loaded: 4.0 GiB of")
    other = beside([small, small, small, small], MACHINE, 10**6)
    assert other.startswith("Beside each other they take each other's place")
    assert "they stay loaded" in beside([small, small, small, small], MACHINE, 20_000)


def test_a_window_layer_keeps_its_last_tokens():
    group = LayerGroup("sliding window", 3, window=128, window_bytes=10)
    assert sequence_cost([group]) == SequenceCost(windows=(WindowCost(30, 128),))


# ----------------------------------------------------------------------------------------------------- errors


def test_a_type_that_keeps_something_of_its_own_is_named():
    with pytest.raises(ModelError, match="rwkv7"):
        layer_groups({"model_type": "rwkv7", "num_hidden_layers": 2})


@pytest.mark.parametrize(
    "config", [{}, {"model_type": "llama"}, {"model_type": "llama", "num_hidden_layers": "4"}]
)
def test_a_config_without_numbers_is_an_error(config):
    with pytest.raises(ModelError, match=r"config\.json does not give"):
        layer_groups(config)


ODD = (
    "x",
    "",
    0,
    -1,
    1.5,
    10**15,
    True,
    [],
    ["x"],
    [[1]],
    {},
    {"a": 1},
    {"bits": 4, "group_size": -3},
    float("nan"),
)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5", "gemma3_text", "gpt_oss", "glm4_moe_lite"])
def test_no_value_of_a_config_does_more_than_make_it_impossible_to_judge(family, tiny_model):
    folder = tiny_model(family)
    config = config_in(folder)
    nested = config.get("text_config", {})
    judged = 0
    for key in {
        *config,
        *nested,
        "quantization",
        "attention_chunk_size",
        "linear_attn_config",
        "num_kv_shared_layers",
    }:
        for value in ODD:
            changed = {**config, key: value}
            if key in nested:
                changed = {**config, "text_config": {**nested, key: value}}
            is_supported(changed)
            try:
                shape = shape_of("odd", changed, weights_in(folder, changed))
            except ModelError:
                continue
            report(shape, MACHINE)
            judged += 1
    assert judged > 100


def test_an_architecture_that_mlx_lm_lacks_or_that_brings_code_is_not_supported():
    assert is_supported({"model_type": "mistral"})
    assert not is_supported({"model_type": "llama", "model_file": "mine.py"})
    assert not is_supported({"model_type": "cache"}), "a helper module of mlx_lm is no architecture"
    assert not is_supported({"model_type": "nothing"})
    assert not is_supported({})


def test_defaults_of_the_class_complete_a_config():
    given = completed(
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560}}
    )
    assert given["text_config"]["sliding_window"] == 512
    assert given["text_config"]["hidden_size"] == 2560
    assert completed({"model_type": "nothing", "a": 1}) == {"model_type": "nothing", "a": 1}
