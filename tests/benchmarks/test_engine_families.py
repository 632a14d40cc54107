"""How speeds of the engine and of mlx_lm's loops are told and compared."""

import pytest

from benchmarks.engine_families import SKIPPED, Rates, Speed, Stamp, _rate, measure
from benchmarks.harness import alternate


def test_a_rate_counts_what_all_replies_say_while_all_of_them_run():
    slow = [Stamp(second, 2 * second) for second in (0.0, *range(1, 12))]
    late = [Stamp(5.0 + place / 2, 10.0 + place) for place in range(SKIPPED + 9)]
    speed = _rate([slow, late])
    start, end = late[SKIPPED].wall, 11.0
    said = sum(start < one.wall <= end for one in [*slow, *late])
    assert speed.wall == pytest.approx(said / (end - start))
    assert speed.cpu == pytest.approx(speed.wall / 2)


def test_rounds_take_turns_and_the_first_one_is_not_counted():
    asked = []

    def side(name):
        def run(number):
            asked.append((name, number))
            return Speed(number, 1.0)

        return run

    rounds = alternate(2, side("bare"), side("served"), warm_up=1)
    assert asked == [("bare", 0), ("served", 0), ("served", 1), ("bare", 1), ("bare", 2), ("served", 2)]
    assert [(bare.wall, served.wall) for bare, served in rounds] == [(1, 1), (2, 2)]


def test_one_slow_round_of_three_does_not_fail_a_demand():
    bare = [Speed(10.0, 10.0)] * 3
    good = zip(bare, [Speed(10.0, 5.0), Speed(1.0, 5.0), Speed(10.1, 5.0)], strict=True)
    slow = zip(bare, [Speed(9.0, 5.0), Speed(1.0, 5.0), Speed(9.7, 5.0)], strict=True)
    assert Rates("", 0.98, list(good)).holds
    assert not Rates("", 0.98, list(slow)).holds


@pytest.mark.thorough
def test_both_sides_compute_a_prompt_and_decode_after_it():
    rates = list(measure("glm4_moe_lite", [96], 1, vocabulary=2048))
    assert [one.name.split(" | ")[-1] for one in rates] == ["prefill", "decode, 1", "decode, 8"]
    assert all(one.ratio > 0 and one.cpu_ratio > 0 for one in rates)
