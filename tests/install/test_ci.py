""".ci/run in a sandbox, with fakes for everything that it starts."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TESTS = "install_and_run.py --test -n 2 --dist loadfile -m not clients and not long and not"
EVERY_TEST, WITHOUT_REAL_WEIGHTS = f"{TESTS} (real and thorough)", f"{TESTS} (real)"


@pytest.fixture
def ci(sandbox):
    """`ci(69)` runs the copied script where building the real weights ends with that status."""
    (sandbox.root / ".ci").mkdir()
    script = shutil.copy(REPOSITORY / ".ci" / "run", sandbox.root / ".ci")
    sandbox.write_script(sandbox.root / "scripts" / "check", 'echo "seven files are formatted"')
    sandbox.add_python(sandbox.bin / "python")
    for program in ("apt-get", "sudo"):
        sandbox.write_script(sandbox.bin / program, "exit 1")

    def run(status: int):
        sandbox.write_script(
            sandbox.venv / "bin/python", f'echo "$*" >> "{sandbox.root}/calls"; exit {status}'
        )
        (sandbox.home / "tmp").mkdir(exist_ok=True)
        done = sandbox.run_command(
            [script], PATH=f"{sandbox.bin}:{os.defpath}", TMPDIR=str(sandbox.home / "tmp")
        )
        assert not [*(sandbox.home / "tmp").iterdir()], "it leaves nothing behind"
        return done

    return run


def test_the_real_weights_are_built_before_the_tests(sandbox, ci):
    assert ci(0).returncode == 0
    assert sandbox.calls()[-2:] == ["scripts/real_model.py float32", EVERY_TEST]


def test_format_lint_and_types_are_checked_meanwhile(sandbox, ci):
    assert "seven files are formatted" in ci(0).stdout.splitlines()


def test_what_is_not_right_ends_the_tests(sandbox, ci):
    sandbox.write_script(sandbox.root / "scripts" / "check", "echo three errors; exit 1")
    sandbox.write_script(sandbox.bin / "python", 'case "$*" in *--test*) exec sleep 90 ;; esac')
    began = time.monotonic()
    done = ci(0)
    assert done.returncode == 1
    assert "three errors" in done.stdout.splitlines()
    assert ".ci/run: format, lint or types are not right" in done.stderr.splitlines()
    assert time.monotonic() - began < 60


def test_tests_that_fail_are_its_failure(sandbox, ci):
    sandbox.write_script(sandbox.bin / "python", 'case "$*" in *--test*) exit 3 ;; esac')
    done = ci(0)
    assert done.returncode == 3
    assert "seven files are formatted" in done.stdout.splitlines()


def test_without_the_weights_it_says_so_and_passes(sandbox, ci):
    done = ci(os.EX_UNAVAILABLE)
    assert done.returncode == 0
    assert ".ci/run: the tests with real weights were left out" in done.stdout.splitlines()
    assert sandbox.calls()[-1] == WITHOUT_REAL_WEIGHTS


def test_weights_that_are_not_what_they_were_stop_it(sandbox, ci):
    done = ci(1)
    assert done.returncode == 1
    assert "the real weights could not be built" in done.stderr
    assert EVERY_TEST not in sandbox.calls()


def test_where_no_python_suits_uv_is_tried_and_its_folder_removed(sandbox, ci):
    sandbox.write_script(sandbox.bin / "python", 'case "$*" in "-B -c "*) exit 1 ;; esac')
    done = ci(0)
    assert done.returncode != 0
    assert ".ci/run: no Python 3.12 here; trying uv" in done.stdout.splitlines()
