"""Adapters beside a model: what is computed under them is what mlx_lm computes with them from the start."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from scripts import tiny_models
from start_llm.core.adapters import BASE_MODEL
from start_llm.core.errors import InvalidRequest, NotFound
from start_llm.models import mlx_lm_utils
from start_llm.models.adapter_loader import Adapters
from start_llm.models.loader import load
from tests import tiny_adapters
from tests.conftest import TinyModel

TOKENS = mx.array([[5, 9, 33, 7, 2, 8]])
CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"


@pytest.fixture(scope="module", params=tiny_models.FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("qwen3", hidden=128, layers=2)


@pytest.fixture(scope="module")
def a(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_adapters.build(model, tmp_path_factory.mktemp("adapters") / "a", 1)


def logits(network: Any) -> mx.array:
    output = network(TOKENS)
    mx.eval(output)
    return output


def fresh(model: Path, adapter: Path | None = None) -> mx.array:
    """What mlx_lm computes with a model that it has just loaded, with an adapter or without."""
    network = load(model).network
    if adapter:
        mlx_lm_utils.load_adapters(network, str(adapter))
    network.eval()
    return logits(network)


def is_same(computed: mx.array, expected: mx.array) -> bool:
    return bool(mx.array_equal(computed, expected).item())


@pytest.mark.parametrize("family", tiny_models.FAMILIES, indirect=True)
@pytest.mark.sample(16)
def test_in_any_order_it_computes_what_a_fresh_load_computes_to_the_bit(
    family: str, tiny_model: TinyModel, tmp_path: Path
):
    folder = tiny_model(family, hidden=128, layers=2)
    places = {name: tiny_adapters.build(folder, tmp_path / name, seed) for seed, name in enumerate("ab")}
    expected = {name: fresh(folder, place) for name, place in places.items()} | {"none": fresh(folder)}
    network = load(folder).network
    adapters = Adapters(network)
    for name, place in places.items():
        adapters.load(name, place)
    for spec in ("a", "b", "a", "none", "b", "none", "a"):
        adapters.mount(adapters.stack(spec))
        assert is_same(logits(network), expected[spec]), spec
    assert not is_same(expected["a"], expected["b"])
    assert not is_same(expected["a"], expected["none"])


@pytest.mark.sample(2)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_model_has_adapters_too(model: Path, tmp_path: Path, bits: int):
    quantised = tmp_path / "quantised"
    loaded: Any = mlx_lm_utils.load(str(model), return_config=True)
    network, tokenizer, config = loaded
    network, config = mlx_lm_utils.quantize_model(network, config, group_size=32, bits=bits)
    mlx_lm_utils.save(quantised, model, network, tokenizer, config)
    adapter = tiny_adapters.build(quantised, tmp_path / "a", 1)
    network = load(quantised).network
    adapters = Adapters(network)
    adapters.load("a", adapter)
    adapters.mount(adapters.stack("a"))
    assert is_same(logits(network), fresh(quantised, adapter))
    adapters.mount(BASE_MODEL)
    assert is_same(logits(network), fresh(quantised))


def test_a_stack_adds_what_each_of_them_adds(model: Path, a: Path, tmp_path: Path):
    """Of one layer alone: the sum of both changes. The layers behind see another input."""
    keys = {"keys": ["mlp.down_proj"]}
    places = {
        name: tiny_adapters.build(model, tmp_path / name, seed, parameters=keys)
        for seed, name in enumerate("xy")
    }
    network = load(model).network
    adapters = Adapters(network)
    for name, place in places.items():
        adapters.load(name, place)
    layer = network.layers[-1].mlp
    width = layer.down_proj.weight.shape[1]
    inputs = mx.random.normal((1, 3, width), key=mx.random.key(7))

    def computed(spec: str) -> mx.array:
        adapters.mount(adapters.stack(spec))
        return layer.down_proj(inputs)

    base, x, y, both = (computed(spec) for spec in ("none", "x", "y", "x+y"))
    assert bool(mx.allclose(both, x + y - base, atol=1e-4).item())
    assert not bool(mx.allclose(both, x, atol=1e-2).item())
    assert is_same(computed("x"), x)
    assert is_same(computed("none"), base)


def test_the_order_of_a_stack_is_part_of_its_digest(model: Path, a: Path, tmp_path: Path):
    adapters = Adapters(load(model).network)
    adapters.load("a", a)
    adapters.load("b", tiny_adapters.build(model, tmp_path / "b", 2))
    specs = ("none", "a", "b", "a+b", "b+a")
    assert len({adapters.stack(spec).digest for spec in specs}) == len(specs)
    assert adapters.stack("") is BASE_MODEL


def test_the_digest_is_that_of_what_was_read_and_not_of_the_name(model: Path, a: Path, tmp_path: Path):
    adapters = Adapters(load(model).network)
    adapters.load("a", a)
    adapters.load("the same", Path(shutil.copytree(a, tmp_path / "copy")))
    assert adapters.stack("a").digest == adapters.stack("the same").digest
    config = json.loads((a / CONFIG).read_text())
    config["lora_parameters"]["scale"] = 19.0
    (tmp_path / "copy" / CONFIG).write_text(json.dumps(config))
    adapters.load("other", tmp_path / "copy")
    assert adapters.stack("a").digest != adapters.stack("other").digest


def test_dora_is_computed_as_mlx_lm_does_and_cannot_be_stacked(model: Path, a: Path, tmp_path: Path):
    dora = tiny_adapters.build(model, tmp_path / "d", 3, kind="dora", parameters={"keys": ["mlp.down_proj"]})
    network = load(model).network
    adapters = Adapters(network)
    adapters.load("a", a)
    adapters.load("d", dora)
    adapters.mount(adapters.stack("d"))
    assert is_same(logits(network), fresh(model, dora))
    for spec in ("a+d", "d+a"):
        with pytest.raises(InvalidRequest, match=r"cannot be: their layers are DoRALinear, LoRALinear"):
            adapters.stack(spec)
    adapters.mount(BASE_MODEL)
    assert is_same(logits(network), fresh(model))


def test_what_is_mounted_is_reported(model: Path, a: Path):
    adapters = Adapters(load(model).network)
    adapter = adapters.load("a", a)
    assert adapters.listed() == [adapter]
    assert (adapter.id, adapter.path, adapter.rank, adapter.scale) == ("a", str(a), 4, 20.0)
    assert adapter.layers == 2 * 7
    assert adapters.nbytes == adapter.nbytes == sum(values.nbytes for values in tensors_of(a).values())


def tensors_of(adapter: Path) -> dict[str, mx.array]:
    loaded: Any = mx.load(str(adapter / WEIGHTS))
    return dict(loaded)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("b", "names 'b', and there is 'a'"),
        ("a+b", "names 'b', and there is 'a'"),
        ("a+a", "names an adapter twice"),
        ("a+", "names '', and there is 'a'"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(model: Path, a: Path, spec: str, problem: str):
    adapters = Adapters(load(model).network)
    adapters.load("a", a)
    with pytest.raises(InvalidRequest, match=problem) as refusal:
        adapters.stack(spec)
    assert refusal.value.param == "adapter"


def test_one_that_was_removed_is_finished_by_who_has_it(model: Path, a: Path):
    network = load(model).network
    adapters = Adapters(network)
    adapters.load("a", a)
    stack = adapters.stack("a")
    adapters.remove("a")
    assert adapters.listed() == []
    adapters.mount(stack)
    assert is_same(logits(network), fresh(model, a))
    adapters.mount(BASE_MODEL)
    assert is_same(logits(network), fresh(model))
    with pytest.raises(NotFound, match="No adapter 'a' is mounted"):
        adapters.remove("a")


# ------------------------------------------------------------------------------------- what cannot be mounted


def rewritten(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Damage to the config."""

    def damage(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        change(config)
        (folder / CONFIG).write_text(json.dumps(config))

    return damage


def with_tensors(change: Callable[[dict[str, mx.array]], object]) -> Callable[[Path], object]:
    """Damage to the tensors."""

    def damage(folder: Path) -> None:
        tensors = tensors_of(folder)
        change(tensors)
        mx.eval(tensors)
        (folder / WEIGHTS).unlink()
        mx.save_safetensors(str(folder / WEIGHTS), tensors)

    return damage


def first(tensors: dict[str, mx.array]) -> str:
    return min(tensors)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "peft": (rewritten(lambda config: config.update(peft_type="LORA")), "the format of PEFT"),
    "full": (
        rewritten(lambda config: config.update(fine_tune_type="full")),
        "'full', which replaces weights",
    ),
    "no config": (lambda folder: (folder / CONFIG).unlink(), "adapter_config.json cannot be read"),
    "no json": (lambda folder: (folder / CONFIG).write_text("{"), "adapter_config.json cannot be read"),
    "a list": (lambda folder: (folder / CONFIG).write_text("[]"), "adapter_config.json is no JSON object"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "it has no adapters.safetensors"),
    "cut weights": (lambda folder: (folder / WEIGHTS).write_bytes(b"\x10" * 40), "RuntimeError"),
    "no rank": (rewritten(lambda config: config["lora_parameters"].pop("rank")), "KeyError: 'rank'"),
    "alpha": (
        rewritten(
            lambda config: config["lora_parameters"].update(alpha=config["lora_parameters"].pop("scale"))
        ),
        "missing required key 'scale'",
    ),
    "another rank": (
        rewritten(lambda config: config["lora_parameters"].update(rank=3)),
        "does not match model parameter shape",
    ),
    "no layers": (rewritten(lambda config: config.pop("num_layers")), "num_layers"),
    "layers that are not there": (
        with_tensors(lambda tensors: tensors.update({f"model.layers.9.{first(tensors)}": mx.zeros((2, 2))})),
        "not an adapter parameter in the model",
    ),
    "keys that are not there": (
        rewritten(lambda config: config["lora_parameters"].update(keys=["no.such.layer"])),
        "not an adapter parameter in the model",
    ),
    "no numbers": (
        with_tensors(
            lambda tensors: tensors.update({key: mx.full(tensors[key].shape, mx.nan) for key in tensors})
        ),
        "values that are no numbers",
    ),
    "nothing": (
        lambda folder: (
            rewritten(lambda config: config["lora_parameters"].update(keys=["no.such.layer"]))(folder),
            with_tensors(lambda tensors: tensors.clear() or tensors.update({}))(folder),
        ),
        "it changes no layer of this model",
    ),
}


@pytest.mark.sample(24)
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_cannot_be_mounted_is_refused_and_changes_nothing(
    model: Path, a: Path, tmp_path: Path, damage: str
):
    network = load(model).network
    adapters = Adapters(network)
    adapters.load("good", a)
    adapters.mount(adapters.stack("good"))  # as it is while a reply is written under it
    copy = Path(shutil.copytree(a, tmp_path / "copy"))
    change, problem = DAMAGES[damage]
    change(copy)
    with pytest.raises(InvalidRequest, match=problem) as refusal:
        adapters.load("good", copy)
    assert refusal.value.param == "path"
    assert str(copy) in refusal.value.message
    assert [adapter.path for adapter in adapters.listed()] == [str(a)]
    adapters.mount(adapters.stack("good"))
    assert is_same(logits(network), fresh(model, a))
    adapters.mount(BASE_MODEL)
    assert is_same(logits(network), fresh(model))


def test_an_adapter_of_another_model_is_refused(tiny_model: TinyModel, model: Path, tmp_path: Path):
    wider = tiny_model("qwen3", hidden=256, layers=2)
    adapter = tiny_adapters.build(wider, tmp_path / "wide", 1)
    adapters = Adapters(load(model).network)
    with pytest.raises(InvalidRequest, match="does not match model parameter shape"):
        adapters.load("wide", adapter)
    assert adapters.listed() == []
