"""The slices of long products that run by default."""

from itertools import product

from tests.slices import spread


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
