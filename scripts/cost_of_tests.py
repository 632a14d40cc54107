"""What tests cost and what they protect: CPU seconds, cases and mutants of each folder.

    python3 install_and_run.py --test -p scripts.cost_of_tests --costs FILE [--every N] [pytest args]
    .venv/bin/python -m scripts.cost_of_tests FILE [--files] [--slowest N]

The first command adds a line for each case to FILE: CPU seconds, those of its fixtures and of the processes
that it waited for included, so that a busy machine changes them little. With `--every`, one of N cases of
each function runs and stands for the others, each of which is taken to cost as much as that one without its
fixtures. The second prints a table.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath

import pytest

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Cost:
    """What a case took.

    Attributes:
        test: path and name, as pytest writes them.
        cpu_s: CPU seconds.
        by_default: it has no mark that leaves it out of a plain run.
        call_s: CPU seconds without those of its fixtures.
        stands_for: for so many cases, itself included.
    """

    test: str
    cpu_s: float
    by_default: bool
    call_s: float = 0
    stands_for: float = 1

    @property
    def all_s(self) -> float:
        """CPU seconds of all cases that it stands for."""
        return self.cpu_s + (self.stands_for - 1) * self.call_s

    @property
    def file(self) -> str:
        return self.test.partition("::")[0]

    @property
    def function(self) -> str:
        return self.test.partition("[")[0]


@dataclass(slots=True)
class Row:
    """Sums of the cases in a folder or a file."""

    cases: float = 0
    cpu_s: float = 0
    default_cases: float = 0
    default_cpu_s: float = 0
    functions: Counter[str] = field(default_factory=Counter[str])

    def add(self, cost: Cost) -> None:
        self.cases += cost.stands_for
        self.cpu_s += cost.all_s
        self.functions[cost.function] += 1
        if cost.by_default:
            self.default_cases += cost.stands_for
            self.default_cpu_s += cost.all_s


# --------------------------------------------------------------------------------------- the plugin of pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", type=Path, required=True, metavar="FILE", help="adds here")
    parser.addoption("--every", type=int, default=1, metavar="N", help="one of N cases stands for the others")


CALL_S = pytest.StashKey[float]()
STANDS_FOR = pytest.StashKey[float]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the cases that stand for others, those of a function that run by default by themselves."""
    kinds: dict[tuple[str, bool], list[pytest.Item]] = {}
    for item in items:
        kinds.setdefault((item.nodeid.partition("[")[0], _is_default(item)), []).append(item)
    chosen: dict[str, float] = {}
    for cases in kinds.values():
        every = min(config.option.every, len(cases))
        some = cases[every // 2 :: every]
        chosen |= {case.nodeid: len(cases) / len(some) for case in some}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]
    for item in items:
        item.stash[STANDS_FOR] = chosen[item.nodeid]


def _is_default(item: pytest.Item) -> bool:
    return not any(item.get_closest_marker(name) for name in ("thorough", "long"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    before = _cpu_s()
    try:
        return (yield)
    finally:
        item.stash[CALL_S] = round(_cpu_s() - before, 4)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    before = _cpu_s()
    try:
        return (yield)
    finally:
        cpu_s, call_s = round(_cpu_s() - before, 4), item.stash.get(CALL_S, 0.0)
        cost = Cost(item.nodeid, cpu_s, _is_default(item), call_s, item.stash[STANDS_FOR])
        costs: Path = item.config.option.costs
        with costs.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(cost)) + "\n")


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of all that it has waited for."""
    return sum(os.times()[:4])


# ------------------------------------------------------------------------------------------------- the table


def rows(costs: Iterable[Cost], *, by_file: bool) -> dict[str, Row]:
    """Return the sums by folder or by file, the dearest first."""
    sums: dict[str, Row] = {}
    for cost in costs:
        sums.setdefault(place_of(cost.file, by_file=by_file), Row()).add(cost)
    return dict(sorted(sums.items(), key=lambda named: -named[1].cpu_s))


def place_of(file: str, *, by_file: bool) -> str:
    """Return the row of a file: itself, or the folder of `tests` that it is in."""
    return file if by_file else "/".join(PurePath(file).parent.parts[:2])


def mutants(texts: Iterable[str], *, by_file: bool) -> Mapping[str, int]:
    """Count by place the mutants that its tests find."""
    tests = (text.partition("\ntest: ")[2].partition("::")[0] for text in texts)
    return Counter(place_of(test, by_file=by_file) for test in tests)


def table(sums: Mapping[str, Row], protected: Mapping[str, int]) -> list[str]:
    """Return the lines of a table in Markdown, with a row for the sum."""
    heads = ("place", "functions", "cases", "CPU s", "default cases", "default CPU s", "mutants")
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    for place, row in sums.items():
        lines.append(_line(place, len(row.functions), row, protected.get(place, 0)))
    whole = Row(
        sum(row.cases for row in sums.values()),
        sum(row.cpu_s for row in sums.values()),
        sum(row.default_cases for row in sums.values()),
        sum(row.default_cpu_s for row in sums.values()),
    )
    functions = sum(len(row.functions) for row in sums.values())
    return [*lines, _line("all", functions, whole, sum(protected.get(place, 0) for place in sums))]


def _line(place: str, functions: int, row: Row, count: int) -> str:
    cases, default_cases = (f"{round(count):,}" for count in (row.cases, row.default_cases))
    figures = (cases, f"{row.cpu_s:.1f}", default_cases, f"{row.default_cpu_s:.1f}")
    return f"| {place} | {functions:,} | {' | '.join(figures)} | {count} |"


def slowest(costs: Iterable[Cost], most: int) -> list[str]:
    """Return the functions that took most, each with its seconds and cases."""
    sums: dict[str, Row] = {}
    for cost in costs:
        sums.setdefault(cost.function, Row()).add(cost)
    dearest = sorted(sums.items(), key=lambda named: -named[1].cpu_s)[:most]
    return [f"{row.cpu_s:8.1f} s  {row.cases:5.0f} cases  {name}" for name, row in dearest]


def read(path: Path) -> list[Cost]:
    return [Cost(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="what --costs has written")
    parser.add_argument("--files", action="store_true", help="a row for each file, not for each folder")
    parser.add_argument("--slowest", type=int, default=0, metavar="N", help="also the N dearest functions")
    asked = parser.parse_args(arguments)
    costs = read(asked.file)
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "mutants").glob("*.mutant")]
    sums = rows(costs, by_file=asked.files)
    lines = [*table(sums, mutants(texts, by_file=asked.files)), "", *slowest(costs, asked.slowest)]
    print("\n".join(lines).rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
