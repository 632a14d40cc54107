"""The cases that run by default, and how processes share them."""

from itertools import product
from pathlib import Path

import pytest

from tests.slices import (
    REST,
    default_cases,
    left_to_long_runs,
    mark_long,
    mark_thorough,
    named_by_mutants,
    spread,
)
from tests.units import UNITS, rank, unit

pytest_plugins = "pytester"


def marks_of(pytester: pytest.Pytester, *named: str) -> dict[str, set[str]]:
    """By name of each case of the file that was made, of which mutants name some."""
    items, _ = pytester.inline_genitems()
    mark_thorough(items)
    mark_long(items, {item.nodeid.partition("::")[0] + f"::{name}" for item in items for name in named})
    return {item.name: {mark.name for mark in item.iter_markers()} for item in items}


def in_ci(pytester: pytest.Pytester, *named: str) -> set[str]:
    return {name for name, marks in marks_of(pytester, *named).items() if "long" not in marks}


def sliced(*axes: range) -> list[tuple[int, ...]]:
    cases = list(product(*axes))
    return [cases[index] for index in sorted(spread(cases))]


def test_of_a_square_the_diagonal_is_taken():
    assert sliced(range(4), range(4)) == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_every_value_is_met_with_no_more_cases_than_the_longest_axis_has():
    chosen = sliced(range(40), range(4), range(2))
    assert len(chosen) == 40
    assert {trait for trait, _, _ in chosen} == {*range(40)}
    assert {(client, on) for _, client, on in chosen} == {*product(range(4), range(2))}


def test_where_cases_are_missing_every_value_is_still_met():
    cases = [(a, b) for a, b in product(range(5), range(5)) if a != b]
    chosen = [cases[index] for index in spread(cases)]
    assert {a for a, _ in chosen} == {b for _, b in chosen} == {*range(5)}


def test_a_case_with_a_value_of_its_own_is_always_taken():
    cases = [("a", "common"), ("b", "common"), ("a", "rare"), ("b", "rarer")]
    assert spread(cases) == {0, 2, 3}


def test_the_functions_of_a_file_run_different_cases_of_their_samples():
    samples = [default_cases(range(10), 4, place) for place in range(4)]
    assert samples[:2] == [{0, 4, 8}, {1, 5, 9}]
    assert set().union(*samples) == {*range(10)}


def test_of_a_sample_at_least_one_case_runs():
    assert [default_cases(range(2), 40, place) for place in range(3)] == [{0}, {1}, {0}]


def test_of_a_product_a_sample_takes_some_cases():
    square = list(product(range(4), range(4)))
    assert default_cases(spread(square), 1, 0) == {0, 5, 10, 15}
    assert default_cases(spread(square), 2, 1) == {5, 15}


def test_ci_runs_a_part_of_what_is_left_out_by_default():
    assert left_to_long_runs(8, {0, 4}, 3) == {2, 3, 6, 7}
    assert left_to_long_runs(2, {0, 1}, 3) == left_to_long_runs(2, {0}, 3) == set()


def test_of_the_functions_of_a_file_ci_runs_different_parts():
    assert left_to_long_runs(8, {0, 4}, 3, 1) == {1, 3, 5, 7}
    assert set[int]().union(*({*range(8)} - left_to_long_runs(8, (), 3, place) for place in range(3))) == {
        *range(8)
    }
    assert left_to_long_runs(2, {0}, 3, 2) == set(), "at least one case runs"


def test_what_ci_leaves_out_of_a_product_has_values_that_other_cases_have(pytester: pytest.Pytester):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.sample(4)
        @pytest.mark.product
        @pytest.mark.checked(4)
        @pytest.mark.parametrize("a", [0, 1, 2, 3])
        @pytest.mark.parametrize("b", [0, 1, 2, 3])
        def test_product(a, b): pass
        """
    )
    cases = in_ci(pytester)
    assert len(cases) == 4 + 12 / 4
    assert cases >= {f"test_product[{n}-{n}]" for n in range(4)}


SAMPLED = """
    import pytest

    @pytest.mark.sample(6)
    @pytest.mark.parametrize("a", range(6))
    @pytest.mark.parametrize("b", range(6))
    def test_pairs(a, b): pass

    @pytest.mark.sample(3)
    @pytest.mark.parametrize("a", range(9))
    def test_list(a): pass

    @pytest.mark.parametrize("a", range(3))
    @pytest.mark.parametrize("b", range(3))
    def test_whole(a, b): pass
"""


def test_of_a_sample_ci_runs_every_value_and_a_part_of_the_other_combinations(pytester: pytest.Pytester):
    pytester.makepyfile(SAMPLED)
    cases = in_ci(pytester)
    pairs = {name for name in cases if name.startswith("test_pairs")}
    assert pairs >= {f"test_pairs[{n}-{n}]" for n in range(6)}
    assert 6 + (30 - 6) / REST <= len(pairs) <= 12 + 24 / REST
    assert sum(name.startswith("test_list") for name in cases) == 9, "each case has a value of its own"
    assert sum(name.startswith("test_whole") for name in cases) == 9, "nothing is left out by default"


def test_ci_leaves_out_no_case_that_a_mutant_names(pytester: pytest.Pytester):
    pytester.makepyfile(SAMPLED)
    left_out = {name for name in marks_of(pytester) if name.startswith("test_pairs")} - in_ci(pytester)
    named = min(left_out)
    assert in_ci(pytester, named) - in_ci(pytester) == {named}
    assert len({name for name in in_ci(pytester, "test_pairs") if name.startswith("test_pairs")}) == 36


def test_mutants_name_functions_and_cases():
    named = named_by_mutants()
    assert all(name.startswith("tests/") and "::test_" in name for name in named)
    assert {name.endswith("]") for name in named} == {True, False}


def test_a_case_that_ci_leaves_out_is_long_and_thorough(pytester: pytest.Pytester):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.sample(4)
        @pytest.mark.checked(2)
        @pytest.mark.parametrize("n", range(8))
        def test_sampled(n): pass

        @pytest.mark.thorough
        @pytest.mark.checked(4)
        @pytest.mark.parametrize("n", range(8))
        def test_whole(n): pass
        """
    )
    by_default = {name for name, marks in marks_of(pytester).items() if "thorough" not in marks}
    assert by_default == {"test_sampled[0]", "test_sampled[4]"}
    assert in_ci(pytester) - by_default == {f"test_sampled[{n}]" for n in (1, 3, 6)} | {
        f"test_whole[{n}]" for n in (1, 5)
    }


@pytest.mark.parametrize("start", [start for starts in UNITS.values() for start in starts])
def test_there_are_tests_of_each_unit(start):
    root = Path(__file__).resolve().parents[1]
    assert any(str(path.relative_to(root)).startswith(start) for path in root.glob("tests/**/test_*.py"))


def test_files_that_share_a_server_are_one_unit_and_come_first():
    assert unit("tests/http/test_calls.py::test_a[b]") == unit("tests/http/test_turns.py::test_c")
    assert unit("tests/core/test_database.py::test_a") == "tests/core/test_database.py"
    assert rank("tests/proxy/test_ports.py::test_a") < rank("tests/http/test_calls.py::test_a")
    assert rank("tests/http/test_calls.py::test_a") < rank("tests/core/test_database.py::test_a")
