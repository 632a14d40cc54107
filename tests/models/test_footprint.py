"""What the summary and `/stats` tell of a model is what it is made of."""

import json
from dataclasses import replace
from typing import Any

import pytest
from mlx_lm.models.cache import ChunkedKVCache, KVCache

from scripts import tiny_models
from start_llm.models.footprint import measure
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
def test_layers_and_weights_of_each_family(family, tiny_model):
    folder = tiny_model(family)
    footprint = measure(load(folder))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert footprint.model_type == family
    assert footprint.layers == LAYERS[family]
    assert footprint.weights_bytes == index["metadata"]["total_size"]
    assert footprint.context_window == tiny_models.MAX_POSITIONS


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
def test_the_window_is_what_the_config_says_or_unknown(config, window, qwen3):
    assert measure(replace(qwen3, config=config)).context_window == window


def test_a_config_without_a_type_is_of_unknown_type(qwen3):
    assert measure(replace(qwen3, config={})).model_type == "unknown"


def test_layers_of_several_kinds_are_counted_apart(qwen3):
    llama4 = measure(replace(qwen3, network=FakeNetwork(ChunkedKVCache(128))))
    assert llama4.layers == {"full attention": 1, "chunked attention": 1}


def test_a_cache_of_an_unknown_class_is_shown_by_its_name(qwen3):
    strange = measure(replace(qwen3, network=FakeNetwork(StrangeCache())))
    assert strange.layers == {"full attention": 1, "StrangeCache": 1}
    assert strange.weights_bytes == 0
