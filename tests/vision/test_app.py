"""A server of a model that sees: what it says at the start, and what it counts."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from start_llm.engine.start_measurements import TowerMemoryCost
from start_llm.wiring.memory_plan import image_memory, memory_budget
from tests.server.client import CHAT, ask, stats
from tests.serving import serving
from tests.vision.seeing import folder_of
from tests.vision.test_loading import without_tower

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "temperature": 0}


@pytest.mark.thorough
def test_a_model_that_sees_is_served_and_says_so():
    with serving(folder_of("qwen3_vl")) as server:
        assert re.search(r"images +up to \d,\d{3} tokens each", server.printed())
        assert ask(server.port, "POST", CHAT, HELLO).json["usage"]["completion_tokens"] == 5
        answer = stats(server.port)
        assert answer["images"] == {
            "tower_runs": 0,
            "tower_seconds": 0.0,
            "kept_bytes": 0,
            "input_bytes": 0,
        }
        assert answer["batch"]["batched"]


@pytest.mark.thorough
def test_a_model_whose_tower_is_gone_serves_text_and_says_why(tmp_path: Path):
    folder = shutil.copytree(folder_of("qwen3_vl"), tmp_path / "blind")
    without_tower(folder)
    with serving(folder) as server:
        assert "none: the folder has no weights of a vision tower" in server.printed()
        assert ask(server.port, "POST", CHAT, HELLO).json["usage"]["completion_tokens"] == 5


@pytest.mark.thorough
def test_images_have_fewer_tokens_where_the_tower_would_take_too_much():
    with serving(folder_of("qwen3_vl")) as server:
        settings = server.app._settings
    share = int(0.08 * memory_budget(settings))
    roomy = image_memory(settings, 4096, TowerMemoryCost(token_bytes=share / 10_000))
    assert (roomy.max_tokens, roomy.tower_bytes) == (4096, int(4096 * share / 10_000))
    tight = image_memory(settings, 4096, TowerMemoryCost(token_bytes=share / 1000))
    assert tight.max_tokens == 512
    assert tight.tower_bytes <= share
    unfused = image_memory(settings, 4096, TowerMemoryCost(pair_bytes=share / 500**2))
    assert unfused.max_tokens == 256
    assert image_memory(settings, 400, TowerMemoryCost(pair_bytes=share / 500**2)).max_tokens == 400
