"""Tokens that were not read twice, over the last hour and the last day."""

from __future__ import annotations

import pytest

from start_llm.telemetry.savings import PromptReading, Savings, SlidingTotal

HOUR, DAY = 3600, 86400


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def reading(cached: int, computed: int, prefill_s: float | None = None, disk_s: float = 0.0) -> PromptReading:
    return PromptReading.of_request(cached=cached, computed=computed, prefill_s=prefill_s, disk_s=disk_s)


def cached(savings: Savings) -> list[int]:
    return [saving.cached for saving in savings.of_hour_and_day()]


def test_tokens_leave_the_hour_and_then_the_day():
    clock = Clock()
    savings = Savings(clock)
    savings.add(reading(100, 10))
    clock.now += HOUR / 2
    savings.add(reading(1, 10))
    assert cached(savings) == [101, 101]
    clock.now += HOUR / 2 + 60
    assert cached(savings) == [1, 101]
    clock.now += HOUR
    assert cached(savings) == [0, 101]
    clock.now += DAY - 2 * HOUR - 900
    assert cached(savings) == [0, 101]
    clock.now += HOUR + 900
    assert cached(savings) == [0, 0]


def test_the_time_saved_comes_from_the_measured_speed_of_computed_tokens():
    savings = Savings(Clock())
    savings.add(reading(3000, 1000, prefill_s=2.0))
    savings.add(reading(500, 0))
    hour, day = savings.of_hour_and_day()
    assert hour == day
    assert (hour.cached, hour.computed, hour.saved_s) == (3500, 1000, 7.0)


def test_the_speed_of_the_day_serves_an_hour_in_which_nothing_was_computed():
    clock = Clock()
    savings = Savings(clock)
    savings.add(reading(0, 1000, prefill_s=1.0))
    clock.now += 2 * HOUR
    savings.add(reading(2000, 1, prefill_s=0.1))
    hour, _ = savings.of_hour_and_day()
    assert hour.saved_s == pytest.approx(2.0)


def test_a_few_tokens_measure_nothing():
    """One step of the network takes as long for one token as for thirty."""
    savings = Savings(Clock())
    savings.add(reading(1000, 31, prefill_s=0.5))
    savings.add(reading(1000, 500, prefill_s=None))
    assert [saving.saved_s for saving in savings.of_hour_and_day()] == [None, None]


def test_the_wait_for_the_disk_is_not_saved():
    savings = Savings(Clock())
    savings.add(reading(1000, 1000, prefill_s=1.0, disk_s=0.25))
    assert savings.of_hour_and_day()[0].saved_s == 0.75
    savings.add(reading(0, 0, disk_s=9.0))
    assert savings.of_hour_and_day()[0].saved_s == 0.0


def test_a_total_holds_a_bounded_number_of_slots_also_if_the_clock_is_set_back():
    total = SlidingTotal(60, 5)
    for minute in (*range(100), 50, 40, 99):
        total.add(minute * 60, reading(1, 0))
    assert total.total(99 * 60).cached == 8
    assert len(total._sums) == 5
