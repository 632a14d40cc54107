"""What `fit` counts for looking at images is what a server sets aside for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from start_llm.core.model_listing import Machine
from start_llm.engine.start_measurements import measure_tower
from start_llm.hosting.model_memory import estimated_needs
from start_llm.library.fit import arithmetic, report
from start_llm.library.folders import shape_in
from start_llm.wiring.memory_plan import image_memory
from tests.flat_settings import settings_of
from tests.serving import serving
from tests.vision.seeing import FAMILIES, eyes, folder_of, model_of

BUDGET = 2**30
MACHINE = Machine("Toy", "Toy", BUDGET, BUDGET)
ALWAYS_ALIKE = ("gemma3", "gemma4", "gemma4_blocks", "mistral3")
"""Families of which every image has all patches that the config tells; nothing is extrapolated for them."""


@pytest.mark.sample(12)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_memory_for_images_is_what_a_server_sets_aside(family: str):
    measured = image_memory(settings_of(memory=BUDGET), 4096, measure_tower(eyes(model_of(family))))
    shape = shape_in(family, folder_of(family))
    assert shape.tower
    assert shape.image_bytes(BUDGET) == measured.kept_bytes == BUDGET // 50
    estimated = shape.tower.within(BUDGET, is_fused=False)
    assert measured.tower_bytes / 1.1 <= estimated <= 0.08 * BUDGET
    if family in ALWAYS_ALIKE:
        assert estimated <= measured.tower_bytes * 2


def test_a_report_counts_it_and_the_window_is_smaller():
    shape = shape_in("qwen3_vl", folder_of("qwen3_vl"))
    estimate = report(shape, MACHINE)
    assert estimate.image_bytes == BUDGET // 50
    assert estimate.transient_bytes == int(0.08 * BUDGET) > shape.transient_bytes
    assert estimate.total_bytes == sum(
        (estimate.weights_bytes, estimate.kv_bytes, estimate.transient_bytes, estimate.image_bytes)
    )
    page = "\n".join(arithmetic(shape, MACHINE, estimate))
    assert "or for an image in the vision tower" in page
    assert "images     20.5 MiB for those that are kept" in page


def test_where_attention_is_fused_there_are_no_pairs():
    tower = shape_in("qwen3_vl", folder_of("qwen3_vl")).tower
    assert tower
    assert tower.within(2**40, is_fused=True) == tower.patches * tower.patch_bytes
    assert tower.within(2**40, is_fused=False) > 10 * tower.within(2**40, is_fused=True)


@pytest.mark.thorough
def test_a_model_that_is_to_be_loaded_beside_others_needs_what_it_needs_then():
    with serving(folder_of("qwen3_vl"), memory=BUDGET, max_kv_size=4096) as server:
        needs = server.app.runtime.needs
        estimated = estimated_needs("qwen3_vl", folder_of("qwen3_vl"), server.app._settings)
    assert estimated.kept_bytes == needs.kept_bytes
    assert estimated.window_bytes == needs.window_bytes
    assert estimated.computing_bytes >= needs.computing_bytes / 1.1


def test_a_model_whose_images_are_not_served_needs_nothing_for_them(tmp_path: Path):
    folder = folder_of("qwen3_vl")
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    del config["vision_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = shape_in("blind", tmp_path)
    assert shape.tower is None
    assert report(shape, MACHINE).image_bytes == 0
