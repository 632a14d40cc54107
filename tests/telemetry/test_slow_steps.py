"""Slow steps are announced while they run, and no others."""

import threading

import pytest

from start_llm.telemetry import terminal
from start_llm.telemetry.terminal import announced_if_slow


def test_a_long_step_is_reported_once_while_it_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(terminal, "MOMENT_S", 0.01)
    announced, heard = list[str](), threading.Event()

    def say(line: str) -> None:
        announced.append(line)
        heard.set()

    with announced_if_slow(say, "Measuring ..."):
        assert heard.wait(20)
    assert announced == ["Measuring ..."]


def test_a_short_step_is_not_reported_nor_one_that_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(terminal, "MOMENT_S", 0.2)
    announced = list[str]()
    with announced_if_slow(announced.append, "Measuring ..."):
        pass
    with pytest.raises(KeyError), announced_if_slow(announced.append, "Measuring ..."):
        raise KeyError
    threading.Event().wait(0.5)
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert not announced
    assert announced.append not in [timer.function for timer in timers]
