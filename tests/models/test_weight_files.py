"""Headers of safetensors files, whole and broken."""

import json
import struct
from pathlib import Path

import pytest

from start_llm.core.errors import ModelError
from start_llm.models.weight_files import (
    Tensor,
    WeightBytes,
    bits_per_weight,
    check_whole,
    header,
    missing_files,
    number_bytes_of,
    routed_experts,
    weights_in,
)

CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 4, "tie_word_embeddings": False}


def write(path: Path, sizes: dict[str, int]) -> None:
    """A file with tensors of bytes, of which nothing but the header is there."""
    content: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    at = 0
    for name, size in sizes.items():
        content[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(content).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def test_a_header_is_read_without_the_contents(tmp_path):
    write(tmp_path / "model.safetensors", {"a": 3, "b": 5})
    assert [*header(tmp_path / "model.safetensors")] == [
        Tensor("a", (3,), 3, "U8"),
        Tensor("b", (5,), 5, "U8"),
    ]


def test_a_file_that_is_shorter_than_its_header_says_is_not_whole(tmp_path):
    path = tmp_path / "model.safetensors"
    write(path, {"a": 3, "b": 5})
    for missing, written in ((8, 7), (1, 1)):
        with pytest.raises(ModelError, match=f"is not whole: {missing} bytes are missing"):
            check_whole(path)
        with path.open("ab") as file:
            file.write(bytes(written))
    check_whole(path)


def test_towers_that_are_not_loaded_and_draft_layers_are_not_counted(tmp_path):
    kept = {
        "model.embed_tokens.weight": 1,
        "lm_head.weight": 2,
        "model.layers.1.mlp.switch_mlp.up_proj.weight": 4,
        "model.layers.1.mlp.shared_experts.up_proj.weight": 8,
        "model.layers.0.mlp.experts.3.up_proj.weight": 16,
    }
    dropped = ("vision_tower.a", "model.visual.b", "mtp.c", "model.layers.2.d", "x.inv_freq", "audio_tower.e")
    write(tmp_path / "model.safetensors", kept | dict.fromkeys(dropped, 1000))
    assert weights_in(tmp_path, CONFIG) == WeightBytes(31, experts=20, embeddings=1)


def test_a_tower_that_is_loaded_counts_and_text_does_not_read_it(tmp_path):
    tower = dict.fromkeys(("vision_tower.a", "model.visual.b", "multi_modal_projector.layers.7.c"), 10)
    kept = {"model.layers.1.mlp.up_proj.weight": 4, "audio_tower.d": 1000}
    write(tmp_path / "model.safetensors", kept | tower)
    read = weights_in(tmp_path, CONFIG | {"model_type": "gemma3", "vision_config": {"depth": 1}})
    assert read == WeightBytes(34, tower=30)
    assert read.read_for_a_token(1.0) == 4
    assert weights_in(tmp_path, CONFIG | {"model_type": "gemma3"}) == WeightBytes(4), "it has no eyes"


def test_a_tied_output_is_counted_once(tmp_path):
    write(tmp_path / "model.safetensors", {"model.embed_tokens.weight": 1, "lm_head.weight": 2})
    assert weights_in(tmp_path, CONFIG | {"tie_word_embeddings": True}) == WeightBytes(1)


def test_files_that_an_index_names_have_to_be_there(tmp_path):
    assert missing_files(tmp_path) == ["model.safetensors"]
    parts = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    write(tmp_path / "model-1.safetensors", {"a": 1})
    assert missing_files(tmp_path) == ["model-2.safetensors"]
    with pytest.raises(ModelError, match=r"not complete: it lacks model-2\.safetensors"):
        weights_in(tmp_path, CONFIG)
    write(tmp_path / "model-2.safetensors", {"b": 1})
    assert missing_files(tmp_path) == []


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_an_index_that_is_none_is_what_is_missing(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert missing_files(tmp_path) == ["model.safetensors.index.json"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no safetensors file"),
        (struct.pack("<Q", 2**40), "no safetensors file"),
        (struct.pack("<Q", 5) + b"{", "cannot be read"),
        (struct.pack("<Q", 2) + b"[]", "no JSON object"),
        (struct.pack("<Q", 9) + b'{"a": {}}', "does not describe 'a'"),
        (struct.pack("<Q", 8) + b'{"a": 5}', "does not describe 'a'"),
    ],
)
def test_a_broken_header_is_reported(tmp_path, content, words):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=words):
        list(header(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    ("numbers", "size"),
    [
        ({"BF16": 100, "F32": 7}, 2),
        ({"F16": 5}, 2),
        ({"F32": 100, "BF16": 99}, 4),
        ({"U32": 1000, "BF16": 20}, 2),
        ({"U32": 1000, "F32": 20}, 4),
        ({"U8": 1000}, None),
        ({"BF16": 0}, None),
        ({}, None),
    ],
)
def test_numbers_are_as_large_as_most_weights_and_scales_are(numbers, size):
    assert number_bytes_of(numbers) == size


@pytest.mark.parametrize(
    ("stated", "bits"),
    [
        ({}, 16),
        ({"torch_dtype": "float32"}, 32),
        ({"quantization": {"bits": 4, "group_size": 64}}, 4.5),
        ({"quantization": {"bits": 8, "group_size": 32}}, 9),
        ({"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}}, 4.25),
        ({"quantization": {"bits": 4, "group_size": 64}, "torch_dtype": "float32"}, 5),
        ({"quantization": {"mode": "odd"}}, 16),
    ],
)
def test_bits_of_a_weight_with_its_scales(stated, bits):
    assert bits_per_weight(CONFIG | stated) == bits


def test_layers_with_experts_are_counted_as_the_config_says():
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 10,
        "num_hidden_layers": 6,
    }
    each = 4 * 3 * 4 * 10
    for more, layers in (
        ({}, 6),
        ({"first_k_dense_replace": 2}, 4),
        ({"decoder_sparse_step": 2}, 3),
        ({"mlp_only_layers": [0, 5]}, 4),
        ({"interleave_moe_layer_step": 2}, 3),
        ({"moe_layer_freq": [0, 1, 1, 0, 0, 0]}, 2),
    ):
        routed = routed_experts(CONFIG | experts | more)
        assert routed is not None
        assert routed.parameters == layers * each
    assert routed_experts(CONFIG) is None
