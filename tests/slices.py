"""Which cases of a long list run by default. The others are marked `thorough`.

@pytest.mark.product            cases that meet every value of every parameter, and as many pairs as they can
@pytest.mark.product(axes=f)    the same for one parameter that is made of several values, which `f` tells
@pytest.mark.sample(4)          one case of four; the next function of the file runs others
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import combinations

import pytest

FEW = 6

type Case = Sequence[Hashable]
"""The values of a case, one for each axis."""


def mark_thorough(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that their function leaves out."""
    places: Counter[str] = Counter()
    for cases in _functions(items):
        product, sample = cases[0].get_closest_marker("product"), cases[0].get_closest_marker("sample")
        if product and len(cases) > FEW:
            _leave_out(cases, spread([_values(item, **product.kwargs) for item in cases]))
        elif sample:
            offset = places[str(cases[0].path)]
            places[str(cases[0].path)] += 1
            every = min(sample.args[0], len(cases))
            _leave_out(cases, {index for index in range(len(cases)) if index % every == offset % every})


def spread(cases: Sequence[Case]) -> set[int]:
    """The indices of few cases that have all values between them: of a square, its diagonal.

    Cases with a value that no other has come first. Then the one with the most values that none has yet; of
    several, one whose values and pairs of values are the rarest so far.
    """
    parts = [tuple(enumerate(case)) for case in cases]
    often = Counter[Hashable](part for case in parts for part in case)
    left, met = set(often), Counter[Hashable]()
    chosen = [index for index, case in enumerate(parts) if any(often[part] == 1 for part in case)]
    for index in chosen:
        _meet(parts[index], left, met)
    useful = list(range(len(parts)))
    while left:
        gains = {i: gain for i in useful if (gain := len(left.intersection(parts[i])))}
        useful = list(gains)
        most = max(gains.values())
        best = min((i for i, gain in gains.items() if gain == most), key=lambda i: _rarity(parts[i], met))
        chosen.append(best)
        _meet(parts[best], left, met)
    return set(chosen)


def _meet(case: Case, left: set[Hashable], met: Counter[Hashable]) -> None:
    left.difference_update(case)
    met.update(case)
    met.update(combinations(case, 2))


def _rarity(case: Case, met: Counter[Hashable]) -> tuple[int, int]:
    return sum(met[part] for part in case), sum(met[pair] for pair in combinations(case, 2))


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


def _leave_out(cases: Sequence[pytest.Item], kept: set[int]) -> None:
    for index, item in enumerate(cases):
        if index not in kept:
            item.add_marker("thorough")
