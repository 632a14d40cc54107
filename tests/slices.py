"""Which cases of a long list run by default. The others are marked `thorough`.

@pytest.mark.product            cases that meet every value of every parameter, and as many pairs as they can
@pytest.mark.product(axes=f)    the same for one parameter that is made of several values, which `f` tells
@pytest.mark.sample(4)          one case of four; the next function of the file runs others.
                                Where a product stands too, one of four of those cases
@pytest.mark.checked(3)         of the cases that are left out by default, one of three runs in CI; the others
                                are `long`. Of a product CI runs those that meet every value too
@examples(15, few=5)            so many examples of Hypothesis, and by default fewer of them
rounds(50, checked=12, few=1)   rounds of the same: all of them, `few` by default, and `checked` of them
                                where what is `long` is left out (`scripts/check --all`, CI)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import combinations

import hypothesis
import pytest

FEW = 6

type Case = Sequence[Hashable]
"""The values of a case, one for each axis."""


class _Run:
    """The present run of pytest; `tests/conftest.py` says what it leaves out."""

    leaves_out = False
    leaves_out_long = False


def begin(marks: str) -> None:
    """Note which marks this run selects (`pytest -m`), before any test is imported."""
    _Run.leaves_out = "not thorough" in marks
    _Run.leaves_out_long = "not long" in marks


def is_thorough() -> bool:
    """Return whether this run leaves nothing out."""
    return not _Run.leaves_out


def rounds(count: int, *, checked: int, few: int = 1) -> int:
    if _Run.leaves_out:
        return few
    return checked if _Run.leaves_out_long else count


def examples(count: int, *, few: int) -> hypothesis.settings:
    return hypothesis.settings(max_examples=few if _Run.leaves_out else count, deadline=None)


def mark_thorough(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that their function leaves out."""
    places: Counter[str] = Counter()
    for cases in _functions(items):
        first = cases[0]
        product, sample = first.get_closest_marker("product"), first.get_closest_marker("sample")
        is_product = product is not None and len(cases) > FEW
        if is_product and product in first.own_markers and sample not in first.own_markers:
            sample = None  # a file's sample is for its functions without a product of their own
        values = [_values(item, **product.kwargs) for item in cases] if product and is_product else None
        wanted = spread(values) if values else {*range(len(cases))}
        kept = default_cases(wanted, sample.args[0] if sample else 1, places[str(first.path)])
        places[str(first.path)] += sample is not None
        for index in set(range(len(cases))) - kept:
            cases[index].add_marker("thorough")
        if checked := first.get_closest_marker("checked"):
            if first.get_closest_marker("thorough"):
                kept = set()
            for index in left_to_long_runs(len(cases), kept | (wanted if values else set()), *checked.args):
                cases[index].add_marker("long")


def default_cases(wanted: Iterable[int], every: int, place: int) -> set[int]:
    """Return the indices of the cases that run by default.

    Args:
        wanted: of all cases; of a product, those that have all values between them.
        every: one of so many of those is wanted; of a function at the next `place`, another one.
    """
    chosen = sorted(wanted)
    every = min(every, len(chosen))
    return set(chosen[place % every :: every])


def left_to_long_runs(count: int, wanted: Iterable[int], every: int) -> set[int]:
    """Return the indices of the cases that CI leaves out: of those not `wanted`, all but one of `every`."""
    rest = sorted({*range(count)}.difference(wanted))
    return {*rest}.difference(rest[::every])


def spread(cases: Sequence[Case]) -> set[int]:
    """The indices of few cases that have all values between them: of a square, its diagonal.

    Cases with a value that no other has come first. Then the one with the most values that none has yet; of
    several, one whose values and pairs of values are the rarest so far.
    """
    parts = _numbered(enumerate(case) for case in cases)
    pairs = _numbered(combinations(case, 2) for case in parts)
    often = Counter(part for case in parts for part in case)
    left, (parts_met, pairs_met) = set(often), ([0] * sum(map(len, one)) for one in (parts, pairs))
    chosen: list[int] = []

    def choose(index: int) -> None:
        chosen.append(index)
        left.difference_update(parts[index])
        for met, numbers in ((parts_met, parts[index]), (pairs_met, pairs[index])):
            for number in numbers:
                met[number] += 1

    def rarity(index: int) -> tuple[int, int]:
        return sum(map(parts_met.__getitem__, parts[index])), sum(map(pairs_met.__getitem__, pairs[index]))

    for index, case in enumerate(parts):
        if any(often[part] == 1 for part in case):
            choose(index)
    useful = list(range(len(parts)))
    while left:
        gains = {i: gain for i in useful if (gain := len(left.intersection(parts[i])))}
        useful = list(gains)
        most = max(gains.values())
        choose(min((i for i, gain in gains.items() if gain == most), key=rarity))
    return set(chosen)


def _numbered(cases: Iterable[Iterable[Hashable]]) -> list[list[int]]:
    """Return a number for each thing of each case, the same for equal things."""
    numbers: dict[Hashable, int] = {}
    return [[numbers.setdefault(one, len(numbers)) for one in case] for case in cases]


def _functions(items: Iterable[pytest.Item]) -> Iterator[list[pytest.Function]]:
    """The cases of each function that has parameters."""
    found: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            found[item.nodeid.partition("[")[0]].append(item)
    return iter(found.values())


def _values(item: pytest.Function, axes: Callable[..., Case] | None = None) -> Case:
    """Parameters are told apart as objects: not all of them can be compared."""
    values = item.callspec.params.values()
    return axes(*values) if axes else [id(value) for value in values]
