"""Ten seconds of trouble; `benchmarks stress --only chaos` has the half hour, with the proxy."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.chaos.play import Crowd, Trouble, play
from tests.conftest import TinyModel

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
