"""Old, short and rarely used things go first."""

import math

from hypothesis import given
from hypothesis import strategies as st

from start_llm.cache.eviction import reluctance

LENGTHS = st.integers(0, 10**6)
COUNTS = st.integers(0, 10**4)
AGES = st.integers(0, 10**6)


@given(length=LENGTHS, uses=COUNTS, age=AGES)
def test_it_is_a_positive_number_for_anything(length, uses, age):
    assert 0 < reluctance(length=length, uses=uses, age=age) < math.inf


@given(length=LENGTHS, uses=COUNTS, age=AGES, more=st.integers(1, 10**6))
def test_longer_more_used_and_younger_things_stay_longer(length, uses, age, more):
    usual = reluctance(length=length, uses=uses, age=age)
    assert reluctance(length=length + more, uses=uses, age=age) >= usual
    assert reluctance(length=length, uses=uses + more, age=age) >= usual
    assert reluctance(length=length, uses=uses, age=age + more) <= usual


def test_each_of_them_matters():
    usual = reluctance(length=100, uses=3, age=10)
    assert reluctance(length=101, uses=3, age=10) > usual
    assert reluctance(length=100, uses=4, age=10) > usual
    assert reluctance(length=100, uses=3, age=11) < usual


def test_a_leaf_that_was_just_used_outlives_a_long_one_that_was_not_for_an_hour():
    assert reluctance(length=256, uses=1, age=1) > reluctance(length=20_000, uses=5, age=1000)
