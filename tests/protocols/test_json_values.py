"""Bodies of very many values are found out before they are parsed."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from start_llm.core.errors import InvalidRequest
from start_llm.protocols.fields import MOST_VALUES, has_more_values, parse_body

HARD_TEXTS = [",[{" * 50, '"' * 30, "\\" * 31, '\\"' * 20 + ",", "", "a", "\u6f22,\U0001f41f"]


@pytest.mark.parametrize("value", [1, "a", [], {}, None, *HARD_TEXTS])
def test_values_are_counted_and_texts_are_one(value: Any):
    raw = json.dumps({"a": [value] * 1000, "b": HARD_TEXTS}).encode()
    assert has_more_values(raw, 999)
    assert not has_more_values(raw, 2020), "an array or an object may count twice"


def test_a_text_that_does_not_end_is_left_to_the_parser():
    assert not has_more_values(b'{"a": ",,,,,,,,', 5)
    assert not has_more_values(b'{"a": ",,,,,,,\\"', 5)


def test_a_text_of_commas_is_read_and_millions_of_values_are_refused():
    commas = "," * (2 * MOST_VALUES)
    assert parse_body(json.dumps({"a": commas}).encode()).value("a") == commas
    began = time.perf_counter()
    with pytest.raises(InvalidRequest, match="more than 4,194,304 values"):
        parse_body(b'{"a": [' + b"[]," * MOST_VALUES + b"1]}")
    assert time.perf_counter() - began < 1
