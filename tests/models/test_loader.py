"""A model folder becomes a model, or one sentence that says why not; its code never runs."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from start_llm.core.errors import ModelError
from start_llm.core.sampling import SamplingChoice
from start_llm.models.loader import author_sampling, load

REPOSITORY = Path(__file__).resolve().parents[2]
EVIL = 'import pathlib\npathlib.Path(__file__).with_name("ran").touch()\n'

type Change = Callable[[Path], object]


def config(**values: Any) -> Change:
    """Keys of config.json, replaced; `...` removes one."""

    def change(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text()) | values
        kept = {name: value for name, value in content.items() if value is not ...}
        (folder / "config.json").write_text(json.dumps(kept))

    return change


def content(name: str, data: str | bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())


def without(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])


def remote_code(folder: Path) -> None:
    """A model that wants its own Python run, by every name that the libraries know."""
    for name in ("evil.py", "modeling_evil.py", "tokenization_evil.py", "__init__.py"):
        (folder / name).write_text(EVIL)
    classes = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"}
    config(auto_map=classes | {"AutoTokenizer": ["tokenization_evil.Tokenizer", None]})(folder)
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer |= {"tokenizer_class": "EvilTokenizer"}
    tokenizer |= {"auto_map": {"AutoTokenizer": ["tokenization_evil.Tokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))


@pytest.fixture
def folder(tmp_path, tiny_model) -> Path:
    """A copy of a tiny model, to be broken."""
    return shutil.copytree(tiny_model("qwen3", hidden=64, layers=1), tmp_path / "model")


BROKEN: dict[str, tuple[Change, str]] = {
    "no config": (without("config.json"), "is not a model folder: it has no config.json"),
    "config is not JSON": (content("config.json", "{"), "config.json is not valid JSON"),
    "config is not text": (content("config.json", b"\xff\xfe\x00"), "config.json is not valid JSON"),
    "config is a list": (content("config.json", "[]"), "config.json is not a JSON object"),
    "no model type": (config(model_type=...), "KeyError: 'model_type'"),
    "unknown model type": (config(model_type="wizard"), "Model type wizard not supported"),
    "model type is no text": (config(model_type=5), "Model type 5 not supported"),
    "config is nested too deeply": (content("config.json", "[" * 100_000), "config.json is not valid JSON"),
    "a model that ends the process": (config(model_type="olmo"), "SystemExit: 1"),
    "a module that is no model": (config(model_type="base"), "no attribute 'Model'"),
    "a size is missing": (config(num_hidden_layers=...), "num_hidden_layers"),
    "a size of the wrong type": (config(num_hidden_layers="two"), "cannot be interpreted as an integer"),
    "a size of zero": (config(num_attention_heads=0), "ZeroDivisionError"),
    "sizes that do not fit the weights": (config(hidden_size=72), "Expected shape"),
    "more layers than weights": (config(num_hidden_layers=2), "Missing 11 parameters"),
    "no weights": (without("model.safetensors"), "No safetensors found"),
    "weights cut short": (cut, "incomplete download or corrupt file"),
    "empty weights": (content("model.safetensors", ""), "Unable to read"),
    "weights that are none": (content("model.safetensors", "weights" * 999), "Invalid json header"),
    "no tokenizer": (without("tokenizer.json"), "tokenizer"),
    "a tokenizer that is not JSON": (content("tokenizer.json", "words"), "Failed to parse tokenizer.json"),
    "a tokenizer of no known kind": (content("tokenizer.json", '{"model": {"type": "Magic"}}'), "Untagged"),
    "an end token that is no number": (content("generation_config.json", '{"eos_token_id": "x"}'), "'x'"),
    "a generation_config that is a list": (content("generation_config.json", "[]"), "'list' object"),
    "a model file of its own": (config(model_file="evil.py"), "custom module ('evil.py')"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused_in_a_sentence(case, folder):
    change, expected = BROKEN[case]
    change(folder)
    with pytest.raises(ModelError) as refused:
        load(folder)
    assert expected in str(refused.value)
    assert str(folder) in str(refused.value)


@pytest.mark.parametrize("asks", [config(model_file="evil.py"), config(model_type="evil"), config()])
def test_code_in_the_folder_never_runs(asks, folder, tmp_path):
    remote_code(folder)
    asks(folder)
    with suppress(ModelError):
        load(folder)
    assert not list(tmp_path.rglob("ran"))


@pytest.mark.parametrize(
    "absent",
    [
        "chat_template.jinja",
        "tokenizer_config.json",
        "generation_config.json",
        "model.safetensors.index.json",
    ],
)
def test_a_folder_loads_without_what_is_optional(absent, folder):
    without(absent)(folder)
    assert load(folder).vocabulary == 2048


def test_a_loaded_model_runs_and_knows_the_width_of_its_logits(chain_model):
    folder = chain_model({"\n": ["Hello", " you"]}, words=["word"])
    model = load(folder)
    entries = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    assert model.vocabulary == json.loads((folder / "config.json").read_text())["vocab_size"] > entries
    assert model.network(mx.array([[1, 2, 3]])).shape == (1, 3, model.vocabulary)
    assert model.config["model_type"] == "qwen3"


@pytest.mark.long
def test_a_process_that_loads_models_keeps_its_limit_on_open_files():
    code = "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    code += "import start_llm.app\n"
    code += "print(*resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    before, after = (tuple(map(int, line.split())) for line in done.stdout.splitlines())
    assert after[0] >= before[0]
    assert after[1] == before[1]


GENERATION: list[tuple[str, SamplingChoice]] = [
    ("{}", SamplingChoice()),
    ("", SamplingChoice()),
    ("[1]", SamplingChoice()),
    ("null", SamplingChoice()),
    ('{"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0, "repetition_penalty": 1.05}',
     SamplingChoice(temperature=0.6, top_p=0.95, top_k=20, min_p=0, repetition_penalty=1.05)),
    ('{"do_sample": true, "temperature": 0.6}', SamplingChoice(temperature=0.6)),
    ('{"do_sample": false, "temperature": 0.6, "top_k": 20}', SamplingChoice(temperature=0)),
    ('{"temperature": null, "top_k": 50.0}', SamplingChoice(top_k=50)),
    ('{"temperature": "0.6", "top_p": true, "top_k": [20]}', SamplingChoice()),
    ('{"temperature": -1, "top_p": 1.5, "top_k": -1, "min_p": 7, "repetition_penalty": 0}', SamplingChoice()),
    ('{"temperature": NaN, "top_p": Infinity, "top_k": 1e99, "min_p": 0.1}', SamplingChoice(min_p=0.1)),
    ('{"temperature": ' + "9" * 400 + ', "top_p": 0.5}', SamplingChoice(top_p=0.5)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), GENERATION)
def test_the_authors_sampling_is_taken_and_values_that_cannot_be_are_ignored(text, expected, tmp_path):
    (tmp_path / "generation_config.json").write_text(text)
    assert author_sampling(tmp_path) == expected


def test_without_a_generation_config_the_author_says_nothing(tmp_path):
    assert author_sampling(tmp_path) == SamplingChoice()


def test_a_loaded_model_carries_its_authors_sampling(folder):
    content("generation_config.json", '{"temperature": 0.7, "top_k": 20}')(folder)
    assert load(folder).sampling == SamplingChoice(temperature=0.7, top_k=20)
