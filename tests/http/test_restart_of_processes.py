"""Servers in processes of their own, asked to end or killed; `benchmarks disk` is the long form."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.disk_restarts import hold, never_stopped, settings
from tests.conftest import TinyModel

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("idle_s", [None, 2.5], ids=["SIGTERM", "SIGKILL"])
def test_conversations_survive_the_end_of_their_server(
    idle_s: float | None, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in settings(tmp_path, write_after_s=0.5).items():
        monkeypatch.setenv(name, value)
    model = tiny_model("qwen3_5", hidden=128, layers=2)
    outcome = hold(model, tmp_path, 2, idle_s)
    outcome.compare(never_stopped(model, tmp_path, 2))
    assert not outcome.problems
    assert outcome.restored > 0
