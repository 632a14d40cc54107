"""Which cases of a long list run by default, and which in CI.

Cases that are left out by default are marked `thorough`; those of them that CI leaves out too are `long`.

@pytest.mark.product            cases that meet every value of every parameter, and as many pairs as they can
@pytest.mark.product(axes=f)    the same for one parameter that is made of several values, which `f` returns
@pytest.mark.sample(4)          one case of four; the next function of the file runs others.
                                Where a product stands too, one of four of those cases
@examples(15, few=5)            so many examples of Hypothesis, and by default fewer of them; without this,
                                a hundred and by default forty
rounds(50, checked=12, few=1)   rounds of the same: all of them, `few` by default, and `checked` of them
                                where what is `long` is left out (CI)

Of a product and of a sample CI runs the cases that meet every value of every parameter. Of the others it runs
one of `REST`, or one of three with

@pytest.mark.checked(3)         also where all cases are `thorough`; of a sample that is no product the
                                default cases run and one of three others, whatever their values

CI leaves out no case that a mutant names, alone or with its whole function (`tests/mutants`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from itertools import combinations
from pathlib import Path

import hypothesis
import numpy as np
import pytest

FEW = 6
REST = 4
"""Of the cases whose values other cases meet too, CI runs one of so many."""
MUTANTS = Path(__file__).with_name("mutants")

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
    """Mark the cases that their function leaves out by default."""
    places: Counter[str] = Counter()
    for cases in _functions(items):
        first = cases[0]
        product, sample = first.get_closest_marker("product"), first.get_closest_marker("sample")
        is_product = product is not None and len(cases) > FEW
        if is_product and product in first.own_markers and sample not in first.own_markers:
            sample = None  # a file's sample is for its functions without a product of their own
        wanted = _covering(cases) if is_product else {*range(len(cases))}
        kept = default_cases(wanted, sample.args[0] if sample else 1, places[str(first.path)])
        places[str(first.path)] += sample is not None
        for index in set(range(len(cases))) - kept:
            cases[index].add_marker("thorough")


def mark_long(items: Iterable[pytest.Item], named: Container[str]) -> None:
    """Mark the cases that CI leaves out: some of those that are `thorough`.

    Args:
        named: the functions and cases that mutants name.
    """
    places: Counter[str] = Counter()
    for cases in _functions(items):
        first = cases[0]
        checked = first.get_closest_marker("checked")
        is_cut = checked or first.get_closest_marker("product") or first.get_closest_marker("sample")
        if not is_cut or first.nodeid.partition("[")[0] in named:
            continue
        every = checked.args[0] if checked else REST
        kept = {index for index, case in enumerate(cases) if not case.get_closest_marker("thorough")}
        if first.get_closest_marker("product") or not checked:
            kept |= _covering(cases)
        for index in left_to_long_runs(len(cases), kept, every, places[str(first.path)]):
            if cases[index].nodeid not in named:
                cases[index].add_marker("long")
        places[str(first.path)] += 1


def named_by_mutants() -> set[str]:
    """Return the functions and cases that mutants name, as pytest writes them."""
    texts = (path.read_text(encoding="utf-8") for path in MUTANTS.glob("*.mutant"))
    return {text.partition("\ntest: ")[2].partition("\n")[0] for text in texts}


def _covering(cases: Sequence[pytest.Function]) -> set[int]:
    """Return the indices of cases that meet every value of every parameter."""
    product = cases[0].get_closest_marker("product")
    return spread([_values(case, **(product.kwargs if product else {})) for case in cases])


def default_cases(wanted: Iterable[int], every: int, place: int) -> set[int]:
    """Return the indices of the cases that run by default.

    Args:
        wanted: of all cases; of a product, those that have all values between them.
        every: one of so many of those is wanted; of a function at the next `place`, another one.
    """
    chosen = sorted(wanted)
    every = min(every, len(chosen))
    return set(chosen[place % every :: every])


def left_to_long_runs(count: int, wanted: Iterable[int], every: int, place: int = 0) -> set[int]:
    """Return the indices of the cases that CI leaves out: of those not `wanted`, all but one of `every`.

    Of a function at the next `place`, another one is run.
    """
    rest = sorted({*range(count)}.difference(wanted))
    return {*rest}.difference(rest[place % min(every, max(len(rest), 1)) :: every])


def spread(cases: Sequence[Case]) -> set[int]:
    """The indices of few cases that have all values between them: of a square, its diagonal.

    Cases with a value that no other has come first. Then the one with the most values that none has yet; of
    several, one whose values and pairs of values are the rarest so far.
    """
    numbered = _numbered(enumerate(case) for case in cases)
    parts, pairs = map(_in_rows, (numbered, _numbered(combinations(case, 2) for case in numbered)))
    often = np.bincount(parts.ravel())
    is_left, parts_met, pairs_met = often > 0, np.zeros_like(often), np.zeros(pairs.max(initial=0) + 1, int)
    is_left[0] = False
    chosen: set[int] = set()

    def choose(index: int) -> None:
        chosen.add(index)
        is_left[parts[index]] = False
        for met, numbers in ((parts_met, parts), (pairs_met, pairs)):
            met[numbers[index]] += 1
            met[0] = 0

    for index in np.flatnonzero(((often[parts] == 1) & (parts > 0)).any(axis=1)):
        choose(int(index))
    while is_left.any():
        gains = is_left[parts].sum(axis=1)
        best = np.flatnonzero(gains == gains.max())
        rarities = pairs_met[pairs[best]].sum(axis=1), parts_met[parts[best]].sum(axis=1)
        choose(int(best[np.lexsort(rarities)[0]]))
    return chosen


def _numbered(cases: Iterable[Iterable[Hashable]]) -> list[list[int]]:
    """Return a number from 1 for each thing of each case, the same for equal things."""
    numbers: dict[Hashable, int] = {}
    return [[numbers.setdefault(thing, len(numbers) + 1) for thing in case] for case in cases]


def _in_rows(numbered: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the numbers of all cases, with zeros at the ends of those that have fewer."""
    longest = max(map(len, numbered), default=0)
    return np.array([[*numbers, *[0] * (longest - len(numbers))] for numbers in numbered], dtype=int)


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
