"""`kv_config.json`: bits of KV by layer, as mlx-optiq writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from start_llm.core.errors import ModelError
from start_llm.models.kv_config import LayerBits, read_kv_config

RIGHT: dict[str, Any] = {"layer_idx": 1, "bits": 4, "group_size": 64}


def read(folder: Path, content: object) -> list[LayerBits]:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "kv_config.json").write_text(text)
    return read_kv_config(folder, 4)


def test_layers_come_in_order_and_what_else_an_entry_says_is_passed_over(tmp_path):
    entries = [RIGHT | {"layer_idx": 3, "bits": 8}, RIGHT | {"sensitivity": 0.2}]
    assert read(tmp_path, entries) == [LayerBits(1, 4, 64), LayerBits(3, 8, 64)]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[{", "it cannot be read"),
        ("\xff", "it cannot be read"),
        pytest.param("[" * 100_000, "it cannot be read", id="deep"),
        ({"layers": [RIGHT]}, "it is no list of layers"),
        ([], "it is no list of layers"),
        ([RIGHT, 4], "entry 1 is no object with layer_idx, bits and group_size"),
        ([{"bits": 4, "group_size": 64}], "entry 0 has no whole number as layer_idx"),
        ([RIGHT | {"layer_idx": True}], "entry 0 has no whole number as layer_idx"),
        ([RIGHT | {"layer_idx": 4}], "entry 0 names layer 4; this model keeps KV in layers 0 to 3"),
        ([RIGHT | {"layer_idx": -1}], "entry 0 names layer -1; this model keeps KV in layers 0 to 3"),
        ([RIGHT | {"bits": 3}], "entry 0 has bits 3; expected one of 4, 8"),
        ([RIGHT | {"bits": 3.5}], "entry 0 has no whole number as bits"),
        ([RIGHT | {"group_size": 48}], "entry 0 has group_size 48; expected one of 32, 64, 128"),
        ([{"layer_idx": 1, "bits": 4}], "entry 0 has no whole number as group_size"),
        ([RIGHT, RIGHT | {"bits": 8}], "layer 1 is in it twice"),
    ],
)
def test_a_wrong_file_is_refused_with_what_is_wrong(content, problem, tmp_path):
    with pytest.raises(ModelError) as refused:
        read(tmp_path, content)
    assert str(refused.value).startswith("KV_BITS=config: kv_config.json of the model cannot be used: ")
    assert problem in str(refused.value)


def test_a_file_that_is_not_there_is_named_with_the_way_out(tmp_path):
    with pytest.raises(ModelError, match=r"has none\. Set KV_BITS to 4 or 8, or leave it out\."):
        read_kv_config(tmp_path, 4)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "kv_config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError, match="it cannot be read"):
        read_kv_config(tmp_path, 4)
