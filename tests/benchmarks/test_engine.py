"""How speeds of the server and of mlx_lm's loops are measured and compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import engine
from benchmarks.harness import alternate, ratio


def test_rounds_take_turns_and_the_first_one_is_not_counted():
    asked: list[tuple[str, int]] = []

    def side(name: str) -> Callable[[int], int]:
        def run(number: int) -> int:
            asked.append((name, number))
            return number

        return run

    rounds = alternate(2, side("bare"), side("served"), warm_up=1)
    assert asked == [("bare", 0), ("served", 0), ("served", 1), ("bare", 1), ("bare", 2), ("served", 2)]
    assert rounds == [(1, 1), (2, 2)]


def test_one_slow_round_of_three_does_not_change_a_ratio():
    assert ratio([(10.0, 10.0), (1.0, 10.0), (10.1, 10.0)]) == 1
    assert ratio([(9.0, 10.0), (1.0, 10.0), (9.7, 10.0)]) == 0.9


def test_no_prompt_of_a_round_begins_like_one_of_another_round():
    asked = [prompt for number in range(30) for prompt in engine.prompts(4, number)]
    assert len({prompt[0] for prompt in asked}) == len(asked), "the server's cache would have its beginning"


@pytest.mark.long
def test_both_sides_compute_a_prompt_and_decode_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("STATE_ROOT", str(tmp_path / "state"))
    monkeypatch.setattr(engine, "LEAST_STEP_S", 0)  # the first of the models will do
    for part in (engine.decode, engine.batch, engine.prefill):
        part(tmp_path, families=["glm4_moe_lite"], behind=[16], hidden=128, rounds=1)
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if " tok/s" in line]
    assert [row[0] for row in rows] == ["| glm4_moe_lite, prompts of 16"] * 3
    assert all(float(row[-1].strip(" |")) > 0 for row in rows)
