"""Real ranks, each with its shard of a network: they say, restore and count what one process does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from scripts.tiny_vision_models import quantise
from start_llm.models.loader import LoadedModel, load
from tests.cache.test_texts import NEAR
from tests.conftest import TinyModel
from tests.ranks import play_images
from tests.ranks.launches import launched, ranks
from tests.ranks.play import Heard, play, resources_of
from tests.ties import Tally, greedy_reference
from tests.vision.seeing import folder_of

pytestmark = pytest.mark.timeout(400)
FAMILIES = ("qwen3", "qwen3_5", "gpt_oss", "glm4_moe_lite")
SEEING = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    *("mistral3", "pixtral"),
)
"""Families whose images are read on several ranks."""
_PATIENCE_S = 300


def spoken(count: int, folders: Sequence[Path]) -> dict[str, Any]:
    """What so many ranks say with each model."""
    program = ["-m", "tests.ranks.rank_program", *map(str, folders)]
    with launched(ranks(count, program)) as launch:
        launch.wait(_PATIENCE_S)
    line = next((text for text in launch.lines if text.startswith("heard ")), None)
    assert line, launch.text
    return json.loads(line.removeprefix("heard "))


@pytest.fixture(scope="module")
def of_two(tiny_model: TinyModel) -> dict[str, Any]:
    """What two ranks say, by family."""
    folders = {name: tiny_model(name, hidden=128, layers=2) for name in (*FAMILIES, "gemma3_text")}
    reports = spoken(2, list(folders.values()))
    return {name: reports[str(folder)] for name, folder in folders.items()}


def alone(folder: Path) -> tuple[Heard, Any]:
    model = load(folder)
    return play(resources_of(model)), model.network


def compare(played: dict[str, Any], folder: Path) -> None:
    """Also with what has to be true: replies are greedy, and what is restored is what would be computed."""
    heard, network = alone(folder)
    tally = Tally()
    for prompt, reply, _ in played["greedy"]:
        tally.compare(reply, greedy_reference(network, prompt, len(reply)))
    tally.assert_ties_are_rare()
    expected = json.loads(json.dumps(asdict(heard)))
    assert played["seeded"] == expected["seeded"]
    assert [restored for *_, restored in played["greedy"]] == [reused for *_, reused in expected["greedy"]]
    assert played["greedy"] == expected["greedy"]
    assert played["kept"] == expected["kept"]
    assert played["counts"] == expected["counts"]
    assert (played["repeated"], played["drafts"]) == (expected["repeated"], expected["drafts"])
    assert played["difference"] < NEAR


@pytest.mark.long
def test_drafts_of_two_ranks_are_taken(of_two):
    _, accepted = of_two["qwen3"]["drafts"]
    assert accepted > 0


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_say_restore_and_count_what_one_does(of_two, tiny_model, family):
    compare(of_two[family], tiny_model(family, hidden=128, layers=2))


@pytest.mark.long
def test_a_network_that_cannot_be_divided_is_refused_by_name(of_two):
    assert of_two["gemma3_text"] == {
        "refused": "mlx_lm cannot divide models of type 'gemma3_text' among several machines."
    }


# ----------------------------------------------------------------------------------------------------- images


@pytest.fixture(scope="module")
def seen_by_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks say of pictures, by family."""
    four_bits = tmp_path_factory.mktemp("four bits") / "qwen3_vl"
    folders = {family: folder_of(family) for family in (*SEEING, "gemma3")}
    folders |= {"four bits": quantise(folder_of("qwen3_vl"), four_bits)}
    results = spoken(2, list(folders.values()))
    return {name: {**results[str(folder)], "folder": folder} for name, folder in folders.items()}


@pytest.mark.long
@pytest.mark.parametrize("family", [*SEEING, "four bits"])
def test_two_ranks_see_restore_and_look_as_one_does(seen_by_two, family):
    compare_seen(seen_by_two[family], load(seen_by_two[family]["folder"]))


def compare_seen(played: dict[str, Any], model: LoadedModel) -> None:
    assert model.vision
    limit = play_images.image_bytes_for(model)
    expected = play_images.play(model, resources_of(model, vision=model.vision, image_bytes=limit))
    tally = Tally()
    for heard, wanted in zip(played["greedy"], expected.greedy, strict=True):
        tally.compare(heard["ids"], wanted.reference)
        assert (heard["restored"], heard["tower_runs"]) == (wanted.restored, wanted.tower_runs)
    tally.assert_ties_are_rare()
    assert played["seeded"] == expected.seeded
    assert tuple(played["counts"]) == expected.counts


@pytest.mark.long
def test_a_model_with_eyes_that_cannot_be_divided_is_refused_by_name(seen_by_two):
    assert "cannot divide models of type 'gemma3'" in seen_by_two["gemma3"]["refused"]


SIX_HEADS = {
    "qwen3": {"num_attention_heads": 6, "num_key_value_heads": 3},
    "gpt_oss": {"num_attention_heads": 6, "num_key_value_heads": 3},
    "glm4_moe_lite": {"num_attention_heads": 6, "num_key_value_heads": 6},
}


@pytest.mark.long
def test_three_ranks_divide_six_heads(tiny_model):
    folders = {name: tiny_model(name, hidden=192, layers=2, **heads) for name, heads in SIX_HEADS.items()}
    results = spoken(3, list(folders.values()))
    for folder in folders.values():
        compare(results[str(folder)], folder)
