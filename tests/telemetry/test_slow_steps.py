"""What takes long is told while it does, and nothing else is."""

import threading

import pytest

from start_llm.telemetry import slow_steps
from start_llm.telemetry.slow_steps import told_if_slow


def test_a_long_step_is_told_once_while_it_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slow_steps, "MOMENT_S", 0.01)
    told, heard = list[str](), threading.Event()

    def say(line: str) -> None:
        told.append(line)
        heard.set()

    with told_if_slow(say, "Measuring ..."):
        assert heard.wait(20)
    assert told == ["Measuring ..."]


def test_a_short_step_is_not_told_nor_one_that_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slow_steps, "MOMENT_S", 0.2)
    told, timers = list[str](), threading.active_count()
    with told_if_slow(told.append, "Measuring ..."):
        pass
    with pytest.raises(KeyError), told_if_slow(told.append, "Measuring ..."):
        raise KeyError
    threading.Event().wait(0.5)
    assert not told and threading.active_count() == timers
