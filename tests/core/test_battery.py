"""Idle work stops on battery; a machine that has none is never on it."""

import subprocess
from pathlib import Path

import pytest

from start_llm.core import battery
from start_llm.core.battery import PowerSource, is_on_battery


def supply(folder: Path, name: str, kind: str, status: str) -> None:
    (folder / name).mkdir()
    (folder / name / "type").write_text(f"{kind}\n")
    (folder / name / "status").write_text(f"{status}\n")


def test_linux_tells_of_a_battery_that_discharges(tmp_path: Path):
    assert not is_on_battery(tmp_path)
    supply(tmp_path, "AC", "Mains", "")
    supply(tmp_path, "BAT0", "Battery", "Charging")
    assert not is_on_battery(tmp_path)
    supply(tmp_path, "BAT1", "Battery", "Discharging")
    assert is_on_battery(tmp_path)


def test_the_battery_of_a_wireless_mouse_is_none_of_the_machine(tmp_path: Path):
    supply(tmp_path, "hidpp_battery_0", "Battery", "Discharging")
    (tmp_path / "hidpp_battery_0" / "scope").write_text("Device\n")
    assert not is_on_battery(tmp_path)
    supply(tmp_path, "BAT0", "Battery", "Discharging")
    (tmp_path / "BAT0" / "scope").write_text("System\n")
    assert is_on_battery(tmp_path)


def test_a_supply_that_tells_nothing_is_no_battery(tmp_path: Path):
    (tmp_path / "BAT0").mkdir()
    (tmp_path / "BAT0" / "type").write_bytes(b"\xff\xfe")
    assert not is_on_battery(tmp_path)


@pytest.mark.parametrize(("output", "is_battery"), [("'Battery Power'", True), ("'AC Power'", False)])
def test_macos_says_where_its_power_comes_from(
    monkeypatch: pytest.MonkeyPatch, output: str, is_battery: bool
):
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, f"Now drawing from {output}\n")

    monkeypatch.setattr(battery.sys, "platform", "darwin")
    monkeypatch.setattr(battery.subprocess, "run", run)
    assert is_on_battery() is is_battery


@pytest.mark.parametrize("error", [OSError("no such file"), subprocess.TimeoutExpired("pmset", 2)])
def test_a_mac_that_does_not_say_counts_as_plugged_in(monkeypatch: pytest.MonkeyPatch, error: Exception):
    def run(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(battery.sys, "platform", "darwin")
    monkeypatch.setattr(battery.subprocess, "run", run)
    assert not is_on_battery()


def test_what_was_seen_is_believed_for_half_a_minute():
    now, looks = [0.0], list[float]()

    def look() -> bool:
        looks.append(now[0])
        return len(looks) == 2

    source = PowerSource(look, lambda: now[0])
    seen = []
    for moment in (0.0, 29.0, 30.0, 59.0, 61.0):
        now[0] = moment
        seen.append(source.is_battery)
    assert seen == [False, False, True, True, False]
    assert looks == [0.0, 30.0, 61.0]
