"""What tests cost is noted case by case, and summed by folder beside the mutants that they find."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.cost_of_tests import Cost, main, mutants, read, rows, slowest, table

pytest_plugins = "pytester"

COSTS = [
    Cost("tests/cache/test_a.py::test_x[1]", 1.0, by_default=True),
    Cost("tests/cache/test_a.py::test_x[2]", 2.0, by_default=False),
    Cost("tests/cache/test_b.py::test_y", 0.5, by_default=True),
    Cost("tests/test_cli.py::test_z", 4.0, by_default=False),
]
MUTANTS = [
    "bug: one\ntest: tests/cache/test_b.py::test_y\n\nin: a",
    "bug: two\ntest: tests/cache/deep/test_c.py::t\n",
]


def test_a_row_has_what_is_below_a_folder_the_dearest_first():
    assert table(rows(COSTS, by_file=False), mutants(MUTANTS, by_file=False))[2:] == [
        "| tests | 1 | 1 | 4.0 | 0 | 0.0 | 0 |",
        "| tests/cache | 2 | 3 | 3.5 | 2 | 1.5 | 2 |",
        "| all | 3 | 4 | 7.5 | 2 | 1.5 | 2 |",
    ]


def test_a_file_has_a_row_of_its_own_if_asked_for():
    sums = rows(COSTS, by_file=True)
    assert list(sums) == ["tests/test_cli.py", "tests/cache/test_a.py", "tests/cache/test_b.py"]
    assert mutants(MUTANTS, by_file=True)["tests/cache/test_b.py"] == 1


def test_the_cases_of_a_function_count_together():
    assert slowest(COSTS, 2) == [
        "     4.0 s      1 cases  tests/test_cli.py::test_z",
        "     3.0 s      2 cases  tests/cache/test_a.py::test_x",
    ]


@pytest.mark.thorough
def test_each_case_is_noted_with_its_fixtures_and_the_processes_that_it_waited_for(
    pytester: pytest.Pytester, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    spin = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    pytester.makepyfile(
        f"""
        import subprocess, sys
        import pytest

        @pytest.fixture
        def slow():
            subprocess.run([sys.executable, "-c", {spin!r}], check=True)

        @pytest.mark.thorough
        def test_waits(slow):
            pass

        def test_does_nothing():
            pass
        """
    )
    pytester.makeini("[pytest]\nmarkers = thorough")
    costs = tmp_path / "costs"
    pytester.inline_run("-p", "scripts.cost_of_tests", "--costs", str(costs))
    waits, nothing = read(costs)
    assert (waits.function.partition("::")[2], waits.by_default) == ("test_waits", False)
    assert waits.cpu_s >= 0.2 > nothing.cpu_s
    assert nothing.by_default
    assert waits.call_s < 0.1, "its fixture is not among it"
    capsys.readouterr()
    assert main([str(costs), "--slowest", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("test_waits")


def test_a_case_that_stands_for_others_counts_their_calls_and_its_own_fixtures_once():
    cost = Cost("tests/test_a.py::test_x[1]", 3.0, by_default=False, call_s=1.0, stands_for=5)
    assert cost.all_s == 7.0
    assert table(rows([cost], by_file=False), {})[-1] == "| all | 1 | 5 | 7.0 | 0 | 0.0 | 0 |"


def test_one_of_so_many_cases_runs_and_stands_for_the_others(pytester: pytest.Pytester, tmp_path: Path):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("n", [*range(8), pytest.param(8, marks=pytest.mark.thorough)])
        def test_many(n): pass

        def test_alone(): pass
        """
    )
    pytester.makeini("[pytest]\nmarkers = thorough")
    costs = tmp_path / "costs"
    pytester.inline_run("-p", "scripts.cost_of_tests", "--costs", str(costs), "--every", "4")
    assert [(cost.test.partition("::")[2], cost.stands_for) for cost in read(costs)] == [
        ("test_many[2]", 4),
        ("test_many[6]", 4),
        ("test_many[8]", 1),
        ("test_alone", 1),
    ]
