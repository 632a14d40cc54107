"""How replies are compared, which takes no weights."""

from __future__ import annotations

import pytest

from tests.real.replies import NearTie, Reference

LOGPROBS = [-0.1, -0.2, -0.3]
SURE = Reference("one two three", LOGPROBS, None, "one two three")
TIED = Reference("one two three", LOGPROBS, 2, "one two")


@pytest.mark.parametrize("reference", [SURE, TIED])
def test_the_same_text_passes_without_a_word(reference: Reference, recwarn: pytest.WarningsRecorder):
    reference.compare("one two three", "a reply")
    assert not recwarn


def test_another_text_fails():
    with pytest.raises(AssertionError):
        SURE.compare("one two four", "a reply")


def test_another_text_behind_a_tie_is_listed():
    with pytest.warns(NearTie, match="a reply: not compared from token 2 on"):
        TIED.compare("one two four", "a reply")


def test_another_text_in_front_of_a_tie_fails():
    with pytest.raises(AssertionError):
        TIED.compare("one four three", "a reply")
