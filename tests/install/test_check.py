"""scripts/check in a sandbox, with a fake environment that records the steps."""

import os
import shutil
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TESTS = "install_and_run.py --test -n 2 --dist loadfile"
CHECKS = ["-m ruff format --check .", "-m ruff check .", "-m basedpyright"]


@pytest.fixture
def check(sandbox):
    """Runs the copied script with fakes for the Python on PATH and for the one of the environment."""
    (sandbox.root / "scripts").mkdir()
    shutil.rmtree(sandbox.root / "start_llm")
    (sandbox.root / "start_llm").mkdir()
    (sandbox.root / "start_llm" / "long.py").write_text("\n" * 500)
    (sandbox.root / "start_llm" / "short.py").write_text("\n" * 7)
    script = shutil.copy(REPOSITORY / "scripts" / "check", sandbox.root / "scripts")
    sandbox.add_python(sandbox.bin / "python3")
    sandbox.add_python(sandbox.venv / "bin/python")
    path = f"{sandbox.bin}:{os.defpath}"
    return lambda *arguments: sandbox.run_command([script, *arguments], PATH=path)


def test_all_four_run_once_and_in_order(sandbox, check):
    done = check()
    assert done.returncode == 0
    assert sandbox.calls() == [
        "install_and_run.py --setup-only --dev",
        *CHECKS,
        "install_and_run.py --test",
    ]
    assert done.stdout.splitlines()[-1] == "== all passed"


def test_no_tests_leaves_the_tests_out(sandbox, check):
    assert check("--no-tests").returncode == 0
    assert sandbox.calls() == ["install_and_run.py --setup-only --dev", *CHECKS]


def test_all_runs_what_is_left_out_by_default(sandbox, check):
    assert check("--all").returncode == 0
    assert sandbox.calls()[-1] == f"{TESTS} -m not clients and not real"


def test_changed_runs_the_tests_and_the_mutants_of_a_change(sandbox, check):
    (sandbox.root / "says-scripts.changed_tests").write_text(
        "tests/a.py\ntests/b.py\ntests/m.py::test[one]\n"
    )
    done = check("--changed", "v1")
    assert sandbox.calls()[4:] == [
        "-m scripts.changed_tests v1",
        f"{TESTS} -m not clients and not real and not long tests/a.py tests/b.py",
        f"{TESTS} -m  tests/m.py::test[one]",
    ]
    assert "== the change concerns 2 test files and 1 mutants" in done.stdout


def test_a_change_that_concerns_no_test_runs_none(sandbox, check):
    assert check("--changed").returncode == 0
    assert sandbox.calls()[4:] == ["-m scripts.changed_tests"]


def test_a_base_that_is_none_stops_it(sandbox, check):
    (sandbox.root / "fail-scripts.changed_tests").touch()
    assert check("--changed", "nowhere").returncode == 1
    assert sandbox.calls()[4:] == ["-m scripts.changed_tests nowhere"]


def test_the_longest_modules_are_reported(sandbox, check):
    lines = check("--no-tests").stdout.splitlines()
    place = lines.index("== longest modules")
    assert [line.split() for line in lines[place + 1 : -1]] == [
        ["500", "start_llm/long.py"],
        ["7", "start_llm/short.py"],
    ]


def test_so_many_modules_that_a_pipe_is_full_do_not_stop_it(sandbox, check):
    for number in range(1200):
        (sandbox.root / "start_llm" / f"{'module_' * 9}{number}.py").touch()
    assert check("--no-tests").returncode == 0


def test_the_first_failure_stops_it(sandbox, check):
    (sandbox.root / "fail-ruff").touch()
    done = check()
    assert done.returncode == 1
    assert sandbox.calls()[1:] == CHECKS[:1]
    assert "== failed: .venv/bin/python -m ruff format --check ." in done.stderr


@pytest.mark.parametrize("options", [["--quick"], ["--all", "v1"], ["--changed", "v1", "v2"], ["v1"]])
def test_an_unknown_option_is_refused(sandbox, check, options):
    assert check(*options).returncode == 2
    assert not sandbox.was_started()
