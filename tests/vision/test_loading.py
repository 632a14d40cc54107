"""A folder with a vision tower becomes a model that sees, or one that serves text and says why."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from scripts import tiny_vision_models
from start_llm.core.errors import ModelError
from start_llm.engine.start_measurements import measure_tower
from start_llm.library.folders import check_loadable
from start_llm.models.footprint import weights_bytes
from start_llm.models.identity import digest_of, identity
from start_llm.models.loader import load
from start_llm.models.vision_families import VISION_FAMILIES
from tests.engine.harness import Stepper
from tests.vision.seeing import FAMILIES, eyes, folder_of, model_of, picture, prompt, resources_of, words

if TYPE_CHECKING:
    from start_llm.models.vision import Vision

REPOSITORY = Path(__file__).resolve().parents[2]
MARKS = {
    "gemma3": ("<start_of_image>", "\n\n<start_of_image>", "<end_of_image>\n\n"),
    "gemma4": ("<|image|>", "<|image>", "<image|>"),
    "gemma4_blocks": ("<|image|>", "<|image>", "<image|>"),
    "mistral3": ("[IMG]", "", "[IMG_END]"),
    "pixtral": ("[IMG]", "", "[IMG_END]"),
}
"""All others have Qwen's."""
EVIL = 'import pathlib\npathlib.Path(__file__).with_name("ran").touch()\n'

type Change = Callable[[Path], object]


def config(**values: Any) -> Change:
    return lambda folder: _update(folder / "config.json", values)


def _update(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def without_tower(folder: Path) -> None:
    """As mlx_lm's converter leaves a folder: the config still tells of the tower."""
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    kept = {name: array for name, array in weights.items() if name.startswith("language_model.")}
    mx.save_safetensors(str(folder / "model.safetensors"), kept, metadata={"format": "mlx"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(kept, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def half_a_tower(folder: Path) -> None:
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    kept = {name: array for name, array in weights.items() if "blocks.0" not in name}
    mx.save_safetensors(str(folder / "model.safetensors"), kept, metadata={"format": "mlx"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a tiny model, to be changed."""
    return shutil.copytree(folder_of("qwen3_vl"), tmp_path / "model")


@pytest.mark.sample(6)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_sees(family):
    model = model_of(family)
    processor = eyes(model).processor
    marks = (processor.placeholder, processor.before, processor.after)
    assert marks == MARKS.get(family, ("<|image_pad|>", "", ""))
    assert eyes(model).moves_positions == family.startswith("qwen")
    assert eyes(model).reads_both_ways == (family == "gemma4_blocks")


def test_every_family_of_the_table_has_a_tiny_model():
    assert {family.removesuffix("_blocks") for family in FAMILIES} == VISION_FAMILIES.keys()


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_runs_are_what_the_models_own_processor_writes(family):
    """For many sizes: `tests.vision.test_equality` compares two prompts only."""
    import numpy as np
    from PIL import Image as Pillow

    row = VISION_FAMILIES[family.removesuffix("_blocks")]
    theirs = row.processor().from_pretrained(str(folder_of(family)), trust_remote_code=False)
    ours = eyes(model_of(family)).processor
    for width, height in ((20, 20), (64, 200), (500, 90), (224, 224), (301, 299)):
        shown = Pillow.new("RGB", (width, height), "red")
        made = theirs(text=[ours.placeholder], images=[shown], add_special_tokens=False)
        ids = [int(token) for token in np.array(made["input_ids"]).reshape(-1)]
        run = ours.expand(picture(1, width, height))
        start = ids.index(run.network_ids[0])
        assert tuple(ids[start : start + len(run)]) == run.network_ids
        assert run.network_ids[0] not in ids[start + len(run) :]


def test_the_text_is_held_once():
    model = model_of("qwen3_vl")
    text = dict(tree_flatten(model.network.parameters()))
    shared = dict(tree_flatten(eyes(model).model.language_model.parameters(), prefix=".language_model"))
    assert shared
    assert all(array is text[name] for name, array in shared.items())
    tower = sum(array.nbytes for array in eyes(model).parameters.values())
    assert tower > 10**6
    weights = sum(array.nbytes for array in text.values())
    assert weights_bytes(model) == weights + tower


@pytest.mark.long
def test_no_torch_is_imported():
    code = (
        "import sys; from pathlib import Path; from start_llm.models.loader import load\n"
        "from tests.vision.seeing import picture\n"
        "for folder in sys.argv[1:]:\n"
        "    model = load(Path(folder)); assert model.vision\n"
        "    model.vision.processor.expand(picture(1)).inputs()\n"
        "print('torch' in sys.modules)"
    )
    folders = [str(folder_of(family)) for family in ("qwen3_vl", "gemma3", "gemma4", "pixtral")]
    done = subprocess.run(
        [sys.executable, "-c", code, *folders], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr


@pytest.mark.long
def test_a_text_model_imports_nothing_of_mlx_vlm(tiny_model):
    code = (
        "import sys; from pathlib import Path; from start_llm.models.loader import load\n"
        "model = load(Path(sys.argv[1])); assert (model.vision, model.blind_reason) == (None, '')\n"
        "print(any(name.startswith('mlx_vlm') for name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_model("qwen3", hidden=64, layers=1))],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr


# ------------------------------------------------------------------------------------------------------ blind


BLIND: dict[str, tuple[Change, str]] = {
    "another family": (config(model_type="qwen3"), "images are served for gemma3,"),
    "no tower": (without_tower, "the folder has no weights of a vision tower"),
    "half a tower": (half_a_tower, "the vision tower cannot be loaded (ValueError: Missing"),
    "a tower of other sizes": (
        lambda folder: config(vision_config=_vision(folder) | {"hidden_size": 32})(folder),
        "the vision tower cannot be loaded (ValueError: Expected shape",
    ),
    "another placeholder": (config(image_token_id=7), "the vision tower cannot be loaded (ValueError"),
    "code for the processor": (
        lambda folder: _update(folder / "preprocessor_config.json", {"auto_map": {"AutoProcessor": "x.Y"}}),
        "auto_map in preprocessor_config.json names code of its own",
    ),
    "code for the model": (config(auto_map={"AutoModel": "x.Y"}), "auto_map in config.json names code"),
    "code deep inside": (
        lambda folder: config(vision_config=_vision(folder) | {"model_file": "x.py"})(folder),
        "model_file in config.json names code",
    ),
}


def _vision(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["vision_config"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", BLIND)
def test_a_model_whose_eyes_cannot_be_used_serves_text_and_says_why(case, folder):
    change, reason = BLIND[case]
    change(folder)
    if case == "another family":
        _flatten(folder)
    model = load(folder)
    assert model.vision is None
    assert reason in model.blind_reason
    logits = model.network(mx.array([[5, 6, 7]]))
    assert logits.shape[-1] == model.vocabulary


def _flatten(folder: Path) -> None:
    """Make a text model of it that still tells of a tower."""
    content = json.loads((folder / "config.json").read_text())
    content |= {key: value for key, value in content["text_config"].items() if key != "model_type"}
    (folder / "config.json").write_text(json.dumps(content))
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    text = {
        name.removeprefix("language_model."): array
        for name, array in weights.items()
        if name.startswith("language_model.")
    }
    mx.save_safetensors(str(folder / "model.safetensors"), text, metadata={"format": "mlx"})
    (folder / "model.safetensors.index.json").unlink()


def test_text_that_both_packages_compute_differently_is_not_mixed(folder):
    """As a corrected error in one of them would, or a convention that only one of them knows."""
    model = load(folder)
    from start_llm.models.vision_loader import Blind, load_vision

    class Louder:
        """mlx_lm's network, with another norm at the end than its parameters say."""

        def __call__(self, *args: Any, **options: Any) -> Any:
            return -model.network(*args, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(model.network, name)

    with pytest.raises(Blind, match="different logits for its text"):
        load_vision(folder, Louder(), model.config, 4096)


def test_the_code_of_a_folder_never_runs(folder, tmp_path):
    for name in ("evil.py", "modeling_evil.py", "processing_evil.py", "__init__.py"):
        (folder / name).write_text(EVIL)
    for changes in ({"model_file": "evil.py"}, {"auto_map": {"AutoProcessor": "processing_evil.P"}}):
        path = folder / ("config.json" if "model_file" in changes else "processor_config.json")
        before = path.read_text()
        _update(path, changes)
        try:
            assert load(folder).vision is None
        except ModelError as refused:
            assert "custom module ('evil.py')" in str(refused)
        path.write_text(before)
    assert not list(tmp_path.rglob("ran"))


@pytest.mark.thorough
def test_the_template_of_an_older_processor_is_found(folder):
    template = folder / "chat_template.jinja"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template.read_text()}))
    expected = load(folder).tokenizer
    template.unlink()
    tokenizer = load(folder).tokenizer
    assert (tokenizer.has_chat_template, tokenizer.chat_template) == (True, expected.chat_template)
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hello"}]}
    ]
    shown = tokenizer.render(messages, None, {}, add_generation_prompt=True, strftime_now=str)
    assert "<|vision_start|><|image_pad|><|vision_end|>Hello" in shown


def test_a_vision_model_with_broken_weights_is_not_called_unknown(folder):
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError) as refused:
        check_loadable(folder)
    assert "has no network" not in str(refused.value)


def test_a_vision_model_that_mlx_lm_does_not_load_is_refused_in_a_sentence(folder):
    config(model_type="glm4v")(folder)
    with pytest.raises(ModelError, match=r"model_type 'glm4v'.*mlx_lm has no network.*qwen3_vl"):
        check_loadable(folder)


# -------------------------------------------------------------------------------------------------- quantised


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantised_folder_sees(family, tmp_path: Path):
    quantised = tiny_vision_models.quantise(folder_of(family), tmp_path / "four bits")
    model = load(quantised)
    seen = prompt(model, words(20), picture(1, 160, 128), words(10))
    engine = Stepper(resources_of(family), network=model.network, vision=eyes(model))
    watched = engine.submit(seen.request(8))
    engine.finish(watched)
    assert len(watched.tokens) == 8
    assert engine.metrics.failures == 0


# ---------------------------------------------------------------------------------------- identity and memory


def test_kv_depends_on_the_tower_and_on_who_computes_it():
    model = model_of("qwen3_vl")
    text_alone = replace(model, vision=None)
    assert digest_of(model) != digest_of(text_alone)
    assert identity(model, b"weights") != identity(text_alone, b"weights")


def test_the_towers_memory_is_measured():
    cost = measure_tower(eyes(model_of("qwen3_vl")))
    assert 10**4 < cost.bytes_of(50) < 10**8
    assert cost.longest(cost.bytes_of(40)) <= 41
    assert cost.longest(0) == 16


@pytest.mark.parametrize(
    ("seconds", "tokens"), [(0.0, [16, 49, 81]), (0.5, [16, 49, 49]), (2.0, [16, 16]), (60.0, [16, 16])]
)
@pytest.mark.sample(2)
def test_a_slow_tower_is_tried_on_small_images_and_counted_rather_too_high(seconds: float, tokens: list[int]):
    """From half a second on an image is looked at twice, because the first time may be that of compiling."""
    vision, seen, now = eyes(model_of("qwen3_vl")), list[int](), [0.0]

    def look(inputs: Any, ids: Sequence[int]) -> Any:
        seen.append(len(ids))
        now[0] += seconds * len(ids) / 16
        return vision.look(inputs, ids)

    watched = cast("Vision", SimpleNamespace(processor=vision.processor, look=look))
    cost = measure_tower(watched, lambda: now[0])
    assert seen == tokens
    assert cost.bytes_of(196) > 0.5 * measure_tower(vision).bytes_of(196)


@pytest.mark.thorough
@pytest.mark.parametrize("family", [family for family in FAMILIES if "moe" not in family])
def test_an_image_leaves_kv_of_the_networks_own_type(family, tmp_path: Path):
    """If an image comes first, its type becomes that of all KV behind it. On a CPU experts need float32."""
    folder = shutil.copytree(folder_of(family), tmp_path / "half")
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    halved = {name: array.astype(mx.bfloat16) for name, array in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), halved, metadata={"format": "mlx"})
    model = load(folder)
    seen = prompt(model, picture(1), words(5))
    engine = Stepper(resources_of(family), network=model.network, vision=eyes(model))
    watched = engine.submit(seen.request(2))
    engine.step_until(lambda: watched.tokens)
    (sequence,) = engine.loop.executor.running.decoder.sequences
    types = {cache.keys.dtype for cache in sequence.layer_caches if hasattr(cache, "keys")}
    assert types == {mx.bfloat16}
