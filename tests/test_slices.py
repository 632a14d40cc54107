"""The cases that run by default, and how processes share them."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from tests.slices import (
    CHECKED,
    REST,
    _Run,
    default_cases,
    left_to_long_runs,
    named_by_mutants,
    spread,
)
from tests.units import UNITS, UnitScheduling, only_outcomes, rank, unit

pytest_plugins = "pytester"


CONFTEST = """
    import pytest

    from tests.slices import choose_cases

    @pytest.hookimpl(trylast=True)
    def pytest_generate_tests(metafunc):
        file = metafunc.definition.nodeid.partition("::")[0]
        choose_cases(metafunc, {{f"{{file}}::{{name}}" for name in {named!r}}})
"""


def marks_of(
    pytester: pytest.Pytester,
    *named: str,
    asked: Sequence[str] = (),
    thorough: bool = True,
    long: bool = True,
) -> dict[str, set[str]]:
    """By name of each case of the file that was made, of which mutants name some.

    Args:
        asked: what pytest is to collect, or all.
        thorough, long: the run has such cases too.
    """
    pytester.makeconftest(CONFTEST.format(named=named))
    with patch.multiple(_Run, leaves_out=not thorough, leaves_out_long=not long):
        items, _ = pytester.inline_genitems(*asked)
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


PRODUCT = """
    import pytest

    @pytest.mark.sample(4)
    @pytest.mark.product
    @pytest.mark.parametrize("a", [0, 1, 2, 3])
    @pytest.mark.parametrize("b", [0, 1, 2, 3])
    def test_product(a, b): pass
"""


def test_of_a_product_ci_runs_few_combinations_of_values_that_other_cases_have(pytester: pytest.Pytester):
    pytester.makepyfile(PRODUCT)
    cases = in_ci(pytester)
    diagonal = {f"test_product[{n}-{n}]" for n in range(4)}
    assert len(cases & diagonal) == 1 + 3 // CHECKED + 1
    assert len(cases - diagonal) == max(12 // REST, 1)


def test_of_a_product_whose_cases_take_long_ci_runs_the_default_cases_and_a_part(pytester: pytest.Pytester):
    pytester.makepyfile(
        PRODUCT.replace("@pytest.mark.product", "@pytest.mark.product\n    @pytest.mark.checked(5)")
    )
    cases = in_ci(pytester)
    assert len(cases) == 1 + 15 / 5
    assert "test_product[0-0]" in cases


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


def test_of_a_sample_ci_runs_a_part_of_the_values_and_a_smaller_one_of_combinations(
    pytester: pytest.Pytester,
):
    pytester.makepyfile(SAMPLED)
    marks, cases = marks_of(pytester), in_ci(pytester)
    ran = {
        name: {case for case in cases if case.startswith(name) and "thorough" in marks[case]}
        for name in ("test_pairs", "test_list", "test_whole")
    }
    pairs, values = (rest_of(marks, "test_pairs", diagonal=on) for on in (False, True))
    assert len(ran["test_pairs"] & values) in counts(len(values) / CHECKED)
    assert len(ran["test_pairs"] & pairs) in counts(len(pairs) / REST)
    assert len(ran["test_list"]) in counts(6 / CHECKED)
    assert sum(name.startswith("test_whole") for name in cases) == 9, "nothing is left out by default"


def rest_of(marks: dict[str, set[str]], name: str, *, diagonal: bool) -> set[str]:
    """The cases of a square that are thorough, on its diagonal or beside it."""
    on = {f"{name}[{n}-{n}]" for n in range(6)}
    thorough = {case for case in marks if case.startswith(name) and "thorough" in marks[case]}
    return thorough & on if diagonal else thorough - on


def counts(share: float) -> range:
    """So many of them, rounded down or up."""
    return range(int(share), int(share) + 2)


def test_the_functions_of_a_file_run_different_cases_in_ci(pytester: pytest.Pytester):
    function = """
        @pytest.mark.thorough
        @pytest.mark.parametrize("n", range(8))
        def test_{}(n): pass
    """
    functions = "".join(map(function.format, range(8)))
    pytester.makepyfile(f"""
        import pytest
        {functions}
    """)
    numbers = sorted(name.partition("[")[2] for name in in_ci(pytester))
    assert numbers == sorted(f"{n}]" for n in range(8))


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


def test_what_a_run_leaves_out_is_not_made(pytester: pytest.Pytester):
    file = pytester.makepyfile(SAMPLED)
    marks = marks_of(pytester)
    by_default = {name for name in marks if "thorough" not in marks[name]}
    assert {*marks_of(pytester, thorough=False)} == by_default < {*marks}
    assert {*marks_of(pytester, long=False)} == in_ci(pytester) < {*marks}
    wanted = f"{file.name}::test_pairs"
    assert len(marks_of(pytester, thorough=False, asked=[wanted])) == 36, "it may be one of them"


def test_of_a_function_that_is_left_out_whole_a_case_shows_it(pytester: pytest.Pytester):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.thorough
        @pytest.mark.parametrize("n", range(8))
        def test_whole(n): pass
        """
    )
    assert {*marks_of(pytester, thorough=False)} == {"test_whole[0]"}
    assert len(marks_of(pytester, long=False)) == -(-8 // CHECKED)


@pytest.mark.parametrize("start", [start for starts in UNITS.values() for start in starts])
def test_there_are_tests_of_each_unit(start):
    root = Path(__file__).resolve().parents[1]
    assert any(str(path.relative_to(root)).startswith(start) for path in root.glob("tests/**/test_*.py"))


def test_files_that_share_a_server_are_one_unit_and_come_first():
    assert unit("tests/http/test_calls.py::test_a[b]") == unit("tests/http/test_turns.py::test_c")
    assert unit("tests/core/test_database.py::test_a") == "tests/core/test_database.py"
    assert rank("tests/proxy/test_ports.py::test_a") < rank("tests/http/test_calls.py::test_a")
    assert rank("tests/http/test_calls.py::test_a") < rank("tests/core/test_database.py::test_a")


class Worker:
    """A process as the scheduler sees it."""

    def __init__(self) -> None:
        self.gateway = SimpleNamespace(id="gw")
        self.shutting_down = False
        self.waiting: list[int] = []
        self.ran: list[str] = []

    def send_runtest_some(self, indices: Sequence[int]) -> None:
        self.waiting += indices

    def shutdown(self) -> None:
        self.shutting_down = True


NAMES = [
    f"tests/core/test_{file}.py::test_{n}"
    for file, count in enumerate((5, 1, 3, 2, 2, 4))
    for n in range(count)
]


def scheduled(*workers: Worker) -> Any:
    config: Any = SimpleNamespace(
        getvalue=lambda _: [f"{len(workers)}*popen"], option=SimpleNamespace(loadscopereorder=False)
    )
    scheduling: Any = UnitScheduling(config)
    for worker in workers:
        scheduling.add_node(worker)
        scheduling.add_node_collection(worker, NAMES)
    scheduling.schedule()
    return scheduling


def run_next(scheduling: Any, worker: Worker) -> None:
    index = worker.waiting.pop(0)
    worker.ran.append(NAMES[index])
    scheduling.mark_test_complete(worker, index)


def test_every_test_runs_once_and_those_of_a_unit_one_after_the_other():
    workers = Worker(), Worker()
    scheduling = scheduled(*workers)
    while any(worker.waiting for worker in workers):
        run_next(scheduling, max(workers, key=lambda worker: len(worker.waiting)))
    assert sorted(workers[0].ran + workers[1].ran) == sorted(NAMES)
    assert all(worker.ran == sorted(worker.ran) and worker.shutting_down for worker in workers)
    assert scheduling.tests_finished and not scheduling.has_pending


def test_what_a_process_had_left_when_it_died_runs_in_the_other():
    dies, lives = Worker(), Worker()
    scheduling = scheduled(dies, lives)
    for _ in range(2):
        run_next(scheduling, dies)
    crashed = NAMES[dies.waiting[0]]
    assert scheduling.remove_node(dies) == crashed
    while lives.waiting:
        run_next(scheduling, lives)
    assert sorted(dies.ran + lives.ran) == sorted(NAMES), "what crashed is tried again"


def test_of_a_case_that_passes_only_the_call_is_sent():
    sent: list[tuple[str, Any]] = []
    send = only_outcomes(lambda name, **known: sent.append((name, known["data"]["when"] if known else None)))
    send("logstart")
    for when, outcome in (("setup", "passed"), ("call", "passed"), ("teardown", "passed")):
        send("testreport", data={"when": when, "outcome": outcome})
    send("logfinish")
    assert sent == [("testreport", "call"), ("logfinish", None)]


@pytest.mark.parametrize("outcome", ["failed", "skipped"])
@pytest.mark.parametrize("when", ["setup", "call", "teardown"])
def test_whatever_fails_is_sent(when, outcome):
    sent: list[str] = []
    send = only_outcomes(lambda name, **_: sent.append(name))
    send("testreport", data={"when": when, "outcome": outcome})
    assert sent == ["testreport"]
