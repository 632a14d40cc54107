"""Which cases of a long list run by default, and which in CI.

Cases that are left out by default are marked `thorough`; those of them that CI leaves out too are `long`.

@pytest.mark.product            cases that meet every value of every parameter, and as many pairs as they can
@pytest.mark.product(axes=f)    the same for one parameter that is made of several values, which `f` returns
@pytest.mark.sample(4)          one case of four; the next function of the file runs others.
                                Where a product stands too, one of four of those cases
@examples(15, few=5)            so many examples of Hypothesis, by default fewer of them, and in CI a third;
                                without this, a hundred, and by default and in CI forty
rounds(50, checked=12, few=1)   rounds of the same: all of them, `few` by default, and `checked` of them
                                where what is `long` is left out (CI)

By default a function without a sample runs at most `MOST` of its cases; where all of them count, it has
`sample(1)`. CI runs them all, and of the cases that a sample or a product leaves out one of `CHECKED`; the
next function of the file runs other ones, so that several functions over the same values meet more of them.
Of the combinations of a product or a sample whose values other cases have, it runs one of `REST`. Where a
case takes long:

@pytest.mark.checked(10)        the cases of its sample or product, and one of ten others

CI leaves out no case that a mutant names, alone or with its whole function (`tests/mutants`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

FEW = 6
MOST = 6
"""By default a function without a sample runs no more of its cases."""
CHECKED = 20
"""Of the cases that a sample, a product or the mark `thorough` leaves out, CI runs one of so many."""
REST = 40
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
    """Return whether this run leaves out nothing that is `thorough` (it may leave out what is `long`)."""
    return not _Run.leaves_out


def is_whole() -> bool:
    """Return whether this run leaves nothing out."""
    return not (_Run.leaves_out or _Run.leaves_out_long)


def rounds(count: int, *, checked: int, few: int = 1) -> int:
    if _Run.leaves_out:
        return few
    return checked if _Run.leaves_out_long else count


def examples(count: int, *, few: int) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=rounds(count, checked=max(count // 3, few), few=few), deadline=None
    )


def choose_cases(metafunc: pytest.Metafunc, named: Container[str]) -> None:
    """Mark the cases of a function, and have pytest make none that this run leaves out.

    Half of all cases are left out by default, and making them took a third of the time of collecting. The
    first case is made nevertheless, so that the function is there. Whoever names functions or cases gets them
    all, as those that are asked for may be among them.

    Args:
        named: the functions and cases that mutants name.
    """
    cases = metafunc._calls
    if not cases:
        return
    function = _Function(metafunc.definition, cases)
    places = metafunc.config.stash.setdefault(_PLACES, Counter[tuple[str, str]]())
    every, chosen, few = {*range(len(cases))}, *_chosen(function, places)
    if is_thorough():
        function.mark("long", _long(function, every - chosen, named, places))
    function.mark("thorough", every - few)
    left_out = {"thorough"} if not is_thorough() else {"long"} if _Run.leaves_out_long else {""}
    if not any("::" in argument for argument in metafunc.config.args):
        cases[:] = [case for case in cases if not function.marks(case) & left_out] or cases[:1]


type _Call = Any
"""A case that pytest has not made yet, with its `id`, `params` and `marks`."""

_PLACES = pytest.StashKey[Counter[tuple[str, str]]]()
"""By a file and a mark, how many functions were cut so."""


@dataclass(frozen=True, slots=True)
class _Function:
    definition: pytest.Function
    cases: Sequence[_Call]

    @property
    def file(self) -> str:
        return str(self.definition.path)

    def own(self, name: str) -> pytest.Mark | None:
        """Return the mark of this name that stands at the function itself."""
        return next((mark for mark in self.definition.own_markers if mark.name == name), None)

    def closest(self, name: str) -> pytest.Mark | None:
        return self.definition.get_closest_marker(name)

    def marks(self, case: _Call) -> set[str]:
        """Return the names of the marks of a case."""
        return {mark.name for mark in (*case.marks, *self.definition.iter_markers())}

    def names(self, index: int) -> set[str]:
        """Return the names under which a mutant may have a case: that of its function, and its own."""
        return {self.definition.nodeid, f"{self.definition.nodeid}[{self.cases[index].id}]"}

    def mark(self, name: str, indices: Iterable[int]) -> None:
        for index in indices:
            self.cases[index].marks.append(getattr(pytest.mark, name).mark)

    def covering(self) -> set[int]:
        """Return the indices of cases that meet every value of every parameter."""
        product = self.closest("product")
        return spread([_values(case, **(product.kwargs if product else {})) for case in self.cases])


def _chosen(function: _Function, places: Counter[tuple[str, str]]) -> tuple[set[int], set[int]]:
    """Return the indices of the cases that product and sample choose, and of those that run by default."""
    count = len(function.cases)
    product, sample = function.closest("product"), function.closest("sample")
    is_product = product is not None and count > FEW
    if is_product and function.own("product") and not function.own("sample"):
        sample = None  # a file's sample is for its functions without a product of their own
    wanted = function.covering() if is_product else {*range(count)}
    place = function.file, "sample" if sample else "thorough"
    chosen = default_cases(wanted, sample.args[0] if sample else 1, places[place])
    few = chosen if sample else default_cases(chosen, -(-len(chosen) // MOST), places[place])
    places[place] += sample is not None or few != chosen
    return chosen, few


def _long(
    function: _Function, not_chosen: set[int], named: Container[str], places: Counter[tuple[str, str]]
) -> set[int]:
    """Return the indices of the cases that CI leaves out: some of those not chosen, or marked `thorough`."""
    if function.definition.nodeid in named:
        return set()
    every = {*range(len(function.cases))}
    marks = {index: function.marks(function.cases[index]) for index in every}
    candidates = not_chosen | {index for index in every if "thorough" in marks[index]}
    rest = {index for index in candidates if "long" not in marks[index]}
    checked, combined = function.closest("checked"), set[int]()
    if not checked and (function.closest("product") or function.closest("sample")):
        combined = rest - function.covering()
    place = function.file, "long"
    share = checked.args[0] if checked else CHECKED
    left_out = left_to_long_runs(len(every), every - (rest - combined), share, places[place])
    left_out |= left_to_long_runs(len(every), every - combined, REST, places[place])
    places[place] += bool(rest)
    return {index for index in left_out if not any(name in named for name in function.names(index))}


@cache
def named_by_mutants() -> set[str]:
    """Return the functions and cases that mutants name, as pytest writes them."""
    texts = (path.read_text(encoding="utf-8") for path in MUTANTS.glob("*.mutant"))
    return {text.partition("\ntest: ")[2].partition("\n")[0] for text in texts}


def default_cases(wanted: Iterable[int], every: int, place: int) -> set[int]:
    """Return the indices of the cases that run by default.

    Args:
        wanted: of all cases; of a product, those that have all values between them.
        every: one of so many of those is wanted; of a function at the next `place`, another one.
    """
    chosen = sorted(wanted)
    every = max(min(every, len(chosen)), 1)
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


def _values(case: _Call, axes: Callable[..., Case] | None = None) -> Case:
    """Parameters are distinguished as objects: not all of them can be compared."""
    values = case.params.values()
    return axes(*values) if axes else [id(value) for value in values]
