"""The summary and `/stats` show the size that a model really has."""

import json
from dataclasses import replace
from typing import Any

import pytest
from mlx_lm.models.cache import ChunkedKVCache, KVCache

from scripts import tiny_models
from start_llm.cache.kinds import label_of
from start_llm.models.footprint import context_window, layer_counts, model_type, weights_bytes
from start_llm.models.loader import LoadedModel, load

HYBRID = {"recurrent state": 3, "full attention": 1}
LAYERS: dict[str, dict[str, int]] = {
    "llama": {"full attention": 4},
    "qwen2": {"full attention": 4},
    "qwen3": {"full attention": 4},
    "qwen3_moe": {"full attention": 4},
    "qwen3_next": HYBRID,
    "qwen3_5": HYBRID,
    "qwen3_5_moe": HYBRID,
    "gemma3_text": {"sliding window": 3, "full attention": 1},
    "gpt_oss": {"sliding window": 2, "full attention": 2},
    "glm4_moe_lite": {"full attention": 4},
    "deepseek_v3": {"full attention": 4},
}


class FakeNetwork:
    """A network of two layers, the second with a cache of its own kind."""

    def __init__(self, cache: object) -> None:
        self._cache = cache

    def make_cache(self) -> list[object]:
        return [KVCache(), self._cache]

    def parameters(self) -> dict[str, Any]:
        return {}


class StrangeCache:
    """Of no class that mlx_lm has, and not to be merged."""


@pytest.fixture(scope="module")
def qwen3(tiny_model) -> LoadedModel:
    return load(tiny_model("qwen3"))


def test_every_family_has_a_row_here():
    assert LAYERS.keys() == set(tiny_models.FAMILIES)


@pytest.mark.parametrize("family", LAYERS)
@pytest.mark.sample(6)
def test_layers_and_weights_of_each_family(family, tiny_model):
    folder = tiny_model(family)
    model = load(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert model_type(model.config) == family
    assert layer_counts(model.network, label_of) == LAYERS[family]
    assert weights_bytes(model) == index["metadata"]["total_size"]
    assert context_window(model.config) == tiny_models.MAX_POSITIONS


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"text_config": {"max_position_embeddings": 4096}}, 4096),
        ({"max_position_embeddings": 4096, "text_config": {"max_position_embeddings": 1}}, 4096),
        ({}, None),
        ({"max_position_embeddings": 0}, None),
        ({"max_position_embeddings": "many", "text_config": None}, None),
        ({"text_config": []}, None),
    ],
)
def test_the_window_is_what_the_config_says_or_unknown(config, window):
    assert context_window(config) == window


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
LONGROPE = {"type": "longrope", "short_factor": [1.0], "long_factor": [32.0]}
LINEAR = {"type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("config", "window"),
    [
        pytest.param({"n_ctx": 1024, "n_positions": 1024}, 1024, id="GPT-2"),
        pytest.param({"n_positions": 8192}, 8192, id="StarCoder"),
        pytest.param({"max_seq_len": 32768}, 32768, id="DBRX"),
        pytest.param({"max_context_length": 2048}, 2048, id="OpenELM"),
        pytest.param({"block_size": 512}, 512, id="Lille"),
        pytest.param({"model_max_length": 1048576}, 1048576, id="Kimi Linear"),
        pytest.param({"max_position_embeddings": 8192, "model_max_length": 131072}, 131072, id="Command R"),
        pytest.param({"max_position_embeddings": 32768, "seq_length": 8192}, 8192, id="the first Qwen"),
    ],
)
def test_the_window_has_many_names(config, window):
    assert context_window(config) == window


@pytest.mark.parametrize(
    ("config", "window"),
    [
        pytest.param({"max_position_embeddings": 32768, "rope_scaling": YARN}, 131072, id="Qwen with YaRN"),
        pytest.param({"max_position_embeddings": 131072, "rope_scaling": YARN}, 131072, id="stated scaled"),
        pytest.param({"max_position_embeddings": 262144, "rope_scaling": YARN}, 262144, id="stated longer"),
        pytest.param(
            {"text_config": {"max_position_embeddings": 32768, "rope_parameters": YARN}},
            131072,
            id="of the text",
        ),
        pytest.param(
            {"max_position_embeddings": 32768, "rope_parameters": {"full_attention": YARN}},
            131072,
            id="of one type of layer",
        ),
        pytest.param({"max_position_embeddings": 131072, "rope_scaling": LLAMA3}, 131072, id="Llama 3.1"),
        pytest.param({"max_position_embeddings": 131072, "rope_scaling": LONGROPE}, 131072, id="Phi 3"),
        pytest.param({"max_position_embeddings": 16384, "rope_scaling": LINEAR}, 16384, id="DeepSeek Coder"),
        pytest.param(
            {"max_position_embeddings": 4096, "max_sequence_length": 16384, "rope_scaling": LINEAR},
            16384,
            id="Vicuna 16k",
        ),
        pytest.param(
            {"max_position_embeddings": 32768, "rope_scaling": {"type": "yarn"}}, 32768, id="no factor"
        ),
        pytest.param({"max_position_embeddings": 32768, "rope_scaling": "yarn"}, 32768, id="no scaling"),
    ],
)
def test_a_scaled_rotation_makes_the_window_longer_only_where_the_config_states_the_short_one(config, window):
    assert context_window(config) == window


def test_a_config_without_a_type_is_of_unknown_type():
    assert model_type({}) == "unknown"


def test_layers_of_several_kinds_are_counted_apart():
    llama4 = FakeNetwork(ChunkedKVCache(128))
    assert layer_counts(llama4, label_of) == {"full attention": 1, "chunked attention": 1}


def test_a_cache_of_an_unknown_class_is_shown_by_its_name(qwen3):
    strange = replace(qwen3, network=FakeNetwork(StrangeCache()))
    assert layer_counts(strange.network, label_of) == {"full attention": 1, "StrangeCache": 1}
    assert weights_bytes(strange) == 0
