"""The check of a chip: each part to its end or its limit, whatever became of the others, and one report."""

import importlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import chip_check, harness
from benchmarks.chip_check import END_S, MOST_S, PARTS, Part, check, findings, outcomes_of_tests, tables

ROOT = Path(chip_check.ROOT)
NAMES = [part.name for part in PARTS]
PYTEST = "....F\n= FAILURES =\nassert 3 passed\n\x1b[31m2 failed\x1b[0m, 31 passed, 1 skipped in 2.20s\n"
TABLE = "Linux, 2 cores\n\n| a | b |\n|---|:-:|\n| 1 | x |\n| 2 | y |\n\nAll right.\n| c |\n|---|\n| 3 |\n"


def part(code: str, **more: Any) -> Part:
    """A part that runs this code in Python."""
    command = f'-c "{code}"'
    options: dict[str, Any] = {"command": command, "quick": command, "limit_s": 60, "read": tables} | more
    return Part(name="made up", shows="nothing", **options)


def run(monkeypatch: pytest.MonkeyPatch, parts: Sequence[Part], *arguments: object) -> int:
    monkeypatch.setattr(chip_check, "PARTS", tuple(parts))
    return chip_check.main([*map(str, arguments)])


def test_all_parts_together_take_at_most_ten_minutes():
    assert sum(part.limit_s + END_S for part in PARTS) <= MOST_S == 600
    assert len(set(NAMES)) == len(NAMES)


def test_a_part_that_fails_or_takes_too_long_stops_no_other(monkeypatch, tmp_path, capsys):
    parts = [
        part("print('| a |'); print('|---|'); print('| 1 |'); raise SystemExit(3)"),
        part("import time; print('begun', flush=True); time.sleep(60)", limit_s=1),
        part("print('fine')"),
    ]
    assert run(monkeypatch, parts, "--json", tmp_path / "out.json") == 1
    report = json.loads((tmp_path / "out.json").read_text())
    assert [entry["outcome"] for entry in report["parts"]] == ["failed", "out of time", "passed"]
    failed, late, passed = report["parts"]
    assert (failed["status"], failed["figures"]["tables"]) == (3, [[{"a": "1"}]])
    assert failed["last_lines"] == ["| a |", "|---|", "| 1 |"]
    assert late["figures"]["lines"][0] == "begun", "what there was until then"
    assert "KeyboardInterrupt" in late["last_lines"][-1], "it could end by itself"
    assert (passed["last_lines"], passed["figures"]["lines"]) == ([], ["fine"])
    assert report["machine"].keys() >= {"kind", "name", "system", "mlx", "mlx-lm", "python"}
    assert report["is_quick"] is False
    output = capsys.readouterr().out
    assert "made up, made up did not pass." in output


def test_without_a_fault_the_status_is_0(monkeypatch, tmp_path, capsys):
    assert run(monkeypatch, [part("pass")], "--json", tmp_path / "out.json") == 0
    assert "All passed." in capsys.readouterr().out


@pytest.mark.long
def test_nothing_of_a_part_is_left_running(tmp_path):
    """One that ignores its end, and a child of one that has ended."""
    child = "import time; time.sleep(60)"
    stubborn = (
        "import os, signal, subprocess, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        f"print(os.getpid(), subprocess.Popen([sys.executable, '-c', '{child}']).pid, flush=True); "
        "time.sleep({sleep})"
    )
    for sleep, limit_s in (("60", 1), ("0", 60)):
        result = check(part(stubborn.replace("{sleep}", sleep), limit_s=limit_s), quick=False, model=None)
        pids = [int(pid) for pid in result.figures["lines"][0].split()]
        assert len(pids) == 2
        assert not [pid for pid in pids if is_running(pid)]


def is_running(pid: int) -> bool:
    """A process that has ended may take a moment to go, or wait for its new parent."""
    for _ in range(100):
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, check=False).stdout
        if not state.strip() or state.strip().startswith(b"Z"):
            return False
        time.sleep(0.05)
    return True


def test_the_report_says_nothing_of_where_the_user_has_what(tmp_path):
    code = f"print('{ROOT}/benchmarks', '{Path.home()}/models'); raise SystemExit(1)"
    result = check(part(code), quick=False, model=None)
    assert result.last_lines == ["./benchmarks ~/models"]
    assert result.figures["lines"] == ["./benchmarks ~/models"]


def test_a_model_and_the_place_of_a_report_are_filled_in(tmp_path):
    code = "import sys, json; print(sys.argv[1:]); json.dump({'a': 1}, open(sys.argv[-1], 'w'))"
    filled = part("", command=f'-c "{code}" MODEL --json REPORT', read=findings)
    assert check(filled, quick=False, model="my folder").figures == {"a": 1}
    shown = part("", command=f'-c "{code}" MODEL --json REPORT')
    assert (
        check(shown, quick=False, model="my folder").figures["lines"][0].startswith("['--model', 'my folder'")
    )
    assert check(shown, quick=False, model=None).figures["lines"][0].startswith("['--demo', ")


def test_a_report_that_was_not_written_is_no_figure():
    assert findings("printed", "") == {}


@pytest.mark.parametrize(
    ("printed", "counts"),
    [
        (PYTEST, {"failed": 2, "passed": 31, "skipped": 1}),
        ("!!! KeyboardInterrupt !!!\n512 passed, 3 deselected in 160.01s", {"passed": 512, "deselected": 3}),
        ("no tests ran in 0.1s", {}),
        ("..sF [ 30%]\n...E\nEnd of it.\n", {"passed": 5, "failed": 1, "errors": 1, "skipped": 1}),
        ("", {}),
    ],
)
def test_tests_are_counted_by_their_outcome(printed: str, counts: Mapping[str, int]):
    assert outcomes_of_tests(printed, "") == counts


def test_tables_are_read_by_their_headings():
    figures = tables(TABLE, "")
    assert figures["tables"] == [[{"a": "1", "b": "x"}, {"a": "2", "b": "y"}], [{"c": "3"}]]
    assert figures["lines"] == ["Linux, 2 cores", "All right."]


def test_an_unknown_part_and_a_place_that_cannot_be_written_are_refused_first(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit) as refused:
        run(monkeypatch, PARTS, "speeed")
    assert refused.value.code == 2
    assert "there is no part 'speeed'; there are tests, truth" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError):
        run(monkeypatch, [part("raise SystemExit(1)")], "--json", tmp_path / "missing" / "out.json")


BENCHMARKS = {
    name: command
    for part in PARTS
    for name, command in ((part.name, part.command), (f"{part.name}, quick", part.quick))
    if command.startswith("-m benchmarks")
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_benchmark_of_a_part_takes_its_options(name: str):
    _, _, program, *arguments = shlex.split(BENCHMARKS[name])
    parser = harness.parser_of(program, importlib.import_module(f"benchmarks.{program}"))
    assert set(parser.parse_args(arguments).only) < set(parser.get_default("only"))


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "name",
    [
        # What the others do is in CI elsewhere: `tests/doctor/test_command.py`, `tests/cache/test_truth.py`,
        # `tests/cache/test_model_types.py`, `test_memory.py`, `tests/benchmarks/test_engine.py`.
        pytest.param(name, marks=[] if name == "disk" else [pytest.mark.long])
        for name in NAMES
        if name != "tests"
    ],
)
def test_a_quick_version_of_each_part_runs_here_and_has_figures(name: str, tmp_path: Path):
    """As a user starts it. `tests` is what runs this."""
    report = tmp_path / "out.json"
    environment = os.environ | {"STATE_ROOT": str(tmp_path / "state")}
    command = [
        sys.executable,
        str(ROOT / "benchmarks"),
        "chip_check",
        name,
        "--quick",
        "--json",
        str(report),
        "--patience",
        "12",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}{report.read_text()}"
    (result,) = json.loads(report.read_text())["parts"]
    assert (result["part"], result["outcome"]) == (name, "passed")
    assert result["figures"].get("tables") or result["figures"].get("findings")
    assert str(tmp_path) not in report.read_text()
