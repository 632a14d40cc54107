"""Ten seconds of trouble; `benchmarks stress --only chaos` has the half hour, with the proxy."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from start_llm.models.loader import load
from tests.chaos.play import TROUBLES, Crowd, Trouble, memory_for, play
from tests.conftest import TinyModel
from tests.serving import serving

QUICK = Crowd(talkers=3, rude=4, every_s=0.3, kill_s=0, least=5, sampled=15)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc, which this system does not have")
@pytest.mark.thorough
def test_nothing_is_left_broken_after_trouble(tiny_model: TinyModel, tmp_path: Path):
    folder = tiny_model("qwen3", hidden=64, layers=2)
    trouble = Trouble("a small cache", {"cache_max_bytes": 3 * 2**20})
    outcome = play(folder, trouble, QUICK, 4, random.Random(1), tmp_path / "scratch")
    assert outcome.problems == []
    assert outcome.heard >= QUICK.least
    assert outcome.compared >= QUICK.least
    assert outcome.fired.total() > 0


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gemma3_text"])
def test_the_memory_of_little_memory_is_enough_to_start_with(tiny_model: TinyModel, family: str):
    """What a server keeps free for computing, drafts and their index is not what its prompts have."""
    (trouble,) = [trouble for trouble in TROUBLES if trouble.room_tokens]
    folder = tiny_model(family, hidden=64, layers=2)
    with serving(folder, **trouble.settings, **memory_for(load(folder), trouble)) as server:
        assert 2_000 < server.app.runtime.card.context_window < 16_000
