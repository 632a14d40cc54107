"""On a CPU weights are converted to float32 where memory allows: faster, and the same answers."""

from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from scripts import tiny_models
from start_llm.core.adapters import BASE_MODEL
from start_llm.models import mlx_lm_utils
from start_llm.models.adapter_loader import Adapters
from start_llm.models.device import Device
from start_llm.models.float32 import AS_STORED, Precision, compute_in_float32, most_float32_bytes
from start_llm.models.footprint import weights_bytes
from start_llm.models.identity import digest_of, identity
from start_llm.models.known_digests import KnownDigests, weight_files_of
from start_llm.models.loader import load
from tests import tiny_adapters
from tests.conftest import TinyModel
from tests.quantised import halve, quantise

PLENTY = 10**12
PROMPT = [5, 9, 40, 77, 130, 8, 3, 61]
CPU = Device("a CPU", {})
FAMILIES = ["qwen3", "qwen3_moe", "gpt_oss", "gemma3_text", "qwen3_5", "deepseek_v3", "llama"]
"""Embeddings tied and untied, experts with and without biases, a window, a state, matrices of heads."""
FORMS = [("affine", 4), ("affine", 8), ("affine", 3), ("mxfp4", 4), ("mxfp8", 8), ("nvfp4", 4)]


def logits(network: Any) -> mx.array:
    """Logits [tokens, vocabulary] of a prompt and of a token after it."""
    caches = make_prompt_cache(network)
    prompt = network(mx.array([PROMPT[:-1]]), cache=caches)
    return mx.concatenate([prompt, network(mx.array([PROMPT[-1:]]), cache=caches)], axis=1)[0].astype(
        mx.float32
    )


def divergence(network: Any, other: Any) -> float:
    """The largest KL divergence of the next token's distribution."""
    ours, theirs = (
        values - mx.logsumexp(values, axis=-1, keepdims=True) for values in (logits(network), logits(other))
    )
    return cast("float", (mx.exp(theirs) * (theirs - ours)).sum(axis=-1).max().item())


def dtypes(network: Any) -> set[mx.Dtype]:
    return {values.dtype for _, values in parameters(network)}


def parameters(network: Any) -> list[tuple[str, mx.array]]:
    weights: Any = tree_flatten(network.parameters())
    return weights


@pytest.mark.parametrize(("mode", "bits"), FORMS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.product
@pytest.mark.sample(8)
def test_answers_are_those_of_the_quantised_network(
    tiny_model: TinyModel, tmp_path: Path, family: str, mode: str, bits: int
):
    folder = quantise(tiny_model(family, hidden=64, layers=2), tmp_path / "q", bits=bits, mode=mode)
    stored, converted = load(folder).network, load(folder, most_float32_bytes=PLENTY).network
    assert mx.uint32 in dtypes(stored)
    assert dtypes(converted) == {mx.float32}
    assert not [name for name, _ in parameters(converted) if "scales" in name]
    assert divergence(converted, stored) < 1e-5


@pytest.mark.thorough
@pytest.mark.checked(2)
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_sixteen_bits_are_converted_too_and_rounding_is_all_that_differs(
    tiny_model: TinyModel, tmp_path: Path, family: str
):
    """Experts in bfloat16 cannot be computed by MLX on a CPU at all."""
    original = tiny_model(family, hidden=64, layers=2)
    for folder in (halve(original, tmp_path / "h"), quantise(original, tmp_path / "q", halves=True)):
        stored, converted = load(folder), load(folder, most_float32_bytes=PLENTY)
        assert mx.bfloat16 in dtypes(stored.network)
        assert dtypes(converted.network) == {mx.float32}
        assert 0 < divergence(converted.network, stored.network) < 0.05, "random weights have large logits"
        assert logits(converted.network).dtype == mx.float32
    assert load(tmp_path / "h", most_float32_bytes=PLENTY).precision.stored == "bfloat16"


def test_experts_of_sixteen_bits_run_on_a_cpu_once_they_are_converted(tiny_model: TinyModel, tmp_path: Path):
    folder = halve(tiny_model("qwen3_moe", hidden=64, layers=2), tmp_path / "h")
    assert bool(mx.isfinite(logits(load(folder, most_float32_bytes=PLENTY).network)).all().item())


def test_scales_are_not_rounded_on_the_way(tiny_model: TinyModel, tmp_path: Path):
    """In bfloat16 the weights would be off by one part in 256."""
    folder = quantise(tiny_model("qwen3", hidden=64, layers=1), tmp_path / "q", halves=True)
    layer = load(folder).network.layers[0].mlp.up_proj
    scales, biases = layer.scales.astype(mx.float32), layer.biases.astype(mx.float32)
    exact = mx.dequantize(layer.weight, scales, biases, layer.group_size, layer.bits)
    weight = load(folder, most_float32_bytes=PLENTY).network.layers[0].mlp.up_proj.weight
    assert mx.array_equal(weight, exact).item()
    rounded = mx.dequantize(layer.weight, layer.scales, layer.biases, layer.group_size, layer.bits)
    assert not mx.array_equal(weight, rounded.astype(mx.float32)).item()


@pytest.mark.thorough
def test_large_weights_are_converted_piece_by_piece_to_the_same(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = quantise(tiny_model("qwen3_moe", hidden=64, layers=1), tmp_path / "q")
    whole = dict(parameters(load(folder, most_float32_bytes=PLENTY).network))
    monkeypatch.setattr("start_llm.models.float32._PIECE", 64 * 7)
    pieces = dict(parameters(load(folder, most_float32_bytes=PLENTY).network))
    assert whole.keys() == pieces.keys()
    assert all(mx.array_equal(values, pieces[name]).item() for name, values in whole.items())


@pytest.mark.thorough
def test_both_forms_of_all_weights_are_never_in_memory_together(tiny_model: TinyModel, tmp_path: Path):
    folder = halve(tiny_model("llama", hidden=256, layers=8), tmp_path / "h")
    network: Any = mlx_lm_utils.load_model(folder, lazy=True)[0]
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    precision = compute_in_float32(network, PLENTY)
    largest = max(values.nbytes for _, values in parameters(network))
    assert mx.get_active_memory() - before == pytest.approx(precision.float32_bytes, rel=0.01)
    assert mx.get_peak_memory() - before < precision.float32_bytes + largest


# ----------------------------------------------------------------------------------------- whether to convert


@pytest.mark.thorough
def test_the_bytes_that_decide_are_those_that_the_weights_then_take(tiny_model: TinyModel, tmp_path: Path):
    folder = quantise(tiny_model("qwen3_moe", hidden=64, layers=2), tmp_path / "q", halves=True)
    model = load(folder, most_float32_bytes=PLENTY)
    taken = model.precision.float32_bytes
    assert weights_bytes(model) == taken
    assert load(folder, most_float32_bytes=taken).precision.is_converted
    kept = load(folder, most_float32_bytes=taken - 1)
    assert kept.precision == Precision("4-bit", taken)
    assert mx.uint32 in dtypes(kept.network)


def test_float32_weights_are_as_they_were(tiny_model: TinyModel):
    model = load(tiny_model("qwen3"), most_float32_bytes=PLENTY)
    assert (model.precision.stored, model.precision.is_converted) == ("float32", False)
    assert model.precision.notice(CPU, PLENTY) == ""


def test_the_memory_of_the_machine_decides_and_only_on_a_cpu():
    assert most_float32_bytes(CPU, 32 * 2**30) == 16 * 2**30
    for info in ({"max_recommended_working_set_size": 2**35}, {"total_memory": 2**35, "free_memory": 2**34}):
        assert most_float32_bytes(Device("a GPU", info), 32 * 2**30) == 0
        assert Precision("4-bit", 2**30).notice(Device("a GPU", info), 0) == ""


def test_the_start_tells_in_one_sentence_what_was_decided():
    converted = Precision("4-bit", 4 * 2**30, is_converted=True)
    assert "4-bit weights were converted to float32" in converted.notice(CPU, 8 * 2**30)
    assert "They take 4.0 GiB (CPU_DEQUANTIZE=off" in converted.notice(CPU, 8 * 2**30)
    kept = Precision("4-bit", 40 * 2**30)
    assert kept.notice(CPU, 8 * 2**30).endswith(
        "in float32 they would take 40.0 GiB, and 8.0 GiB are allowed."
    )
    assert kept.notice(CPU, 0).endswith("CPU_DEQUANTIZE is off.")


# ---------------------------------------------------------------------------------------------- what KV is of


@pytest.mark.thorough
def test_kv_of_converted_weights_is_nobody_elses(tiny_model: TinyModel, tmp_path: Path):
    folder = quantise(tiny_model("qwen3", hidden=64, layers=1), tmp_path / "q")
    stored, converted = load(folder), load(folder, most_float32_bytes=PLENTY)
    assert digest_of(stored) != digest_of(converted)
    assert identity(stored, b"digest") != identity(converted, b"digest"), "whatever the digest says"
    assert identity(converted, b"digest") == identity(load(folder, most_float32_bytes=PLENTY), b"digest")
    assert AS_STORED.is_converted is False


def test_a_digest_of_stored_weights_is_not_that_of_converted_ones(tmp_path: Path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    known = KnownDigests(tmp_path / "weights.json", tell=pytest.fail)
    files = weight_files_of(folder)
    assert known.get(folder, files, lambda: b"stored") == b"stored"
    assert known.get(folder, files, lambda: b"converted", in_float32=True) == b"converted"
    assert known.get(folder, files, pytest.fail) == b"stored", "both are remembered"
    assert known.get(folder, files, pytest.fail, in_float32=True) == b"converted"


@pytest.mark.thorough
def test_adapters_are_mounted_on_converted_layers(tiny_model: TinyModel, tmp_path: Path):
    folder = quantise(tiny_model("llama", hidden=64, layers=2), tmp_path / "q")
    adapter = tiny_adapters.build(folder, tmp_path / "a", 1)
    networks = [load(folder).network, load(folder, most_float32_bytes=PLENTY).network]
    mounted = [Adapters(network) for network in networks]
    alone = logits(networks[1])
    for adapters in mounted:
        adapters.load("a", adapter)
        adapters.mount(adapters.stack("a"))
    assert divergence(*networks) < 1e-5
    assert not mx.allclose(alone, logits(networks[1]), atol=1e-3).item()
    for adapters in mounted:
        adapters.mount(BASE_MODEL)
    assert mx.array_equal(alone, logits(networks[1])).item()


@pytest.mark.long
def test_every_family_computes_in_float32_once_it_is_converted(tiny_model: TinyModel, tmp_path: Path):
    for family in tiny_models.FAMILIES:
        folder = quantise(tiny_model(family, hidden=128, layers=2), tmp_path / family, halves=True)
        model = load(folder, most_float32_bytes=PLENTY)
        caches = make_prompt_cache(model.network)
        model.network(mx.array([PROMPT]), cache=caches)
        kept: Any = tree_flatten([cache.state for cache in caches])
        held = {array.dtype for _, array in kept if isinstance(array, mx.array)}
        assert mx.bfloat16 not in held and mx.float16 not in held, family
