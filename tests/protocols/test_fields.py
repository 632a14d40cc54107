"""Reading JSON bodies: what is wrong is named by its path, and `null` is absent."""

import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.errors import InvalidRequest
from start_llm.core.sampling import SEED_RANGE, Range
from start_llm.protocols.fields import MOST_VALUES, Fields, parse_body, parse_embedded, type_name
from tests.protocols.helpers import body

TEN = Range(0, 10)
VALUES = [True, 1, 1.5, "text", [1], {"a": 1}]

type Read = Callable[[Fields], Any]

READERS: dict[str, tuple[Read, Any, list[Any]]] = {
    "text": (lambda fields: fields.text("x"), None, ["text"]),
    "boolean": (lambda fields: fields.boolean("x"), False, [True]),
    "number": (lambda fields: fields.number("x", TEN), None, [1, 1.5]),
    "integer": (lambda fields: fields.integer("x", TEN), None, [1]),
    "array": (lambda fields: fields.array("x"), [], [[1]]),
    "object": (lambda fields: fields.object("x"), None, [{"a": 1}]),
    "objects": (lambda fields: list(fields.objects("x")), [], []),
    "texts": (lambda fields: fields.texts("x"), (), ["text"]),
}
"""How a field is read, what it is when it is absent, and which of VALUES it may be."""


def refusal(read: Callable[[], object]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        read()
    return refused.value


@pytest.mark.parametrize("name", READERS)
def test_null_and_absent_are_the_same(name):
    read, absent, _ = READERS[name]
    assert read(body()) == read(body(x=None)) == absent


@pytest.mark.parametrize("value", VALUES, ids=map(str, VALUES))
@pytest.mark.parametrize("name", READERS)
def test_each_reader_takes_its_type_and_names_any_other(name, value):
    read, _, takes = READERS[name]
    if any(value == accepted and type(value) is type(accepted) for accepted in takes):
        read(body(x=value))
        return
    error = refusal(lambda: read(Fields(body(x=value).data, "deep[3]")))
    assert error.param is not None
    assert error.param.startswith("deep[3].x")
    assert f"'{error.param}' must be" in error.message
    if not (isinstance(value, float) or name in ("objects", "texts")):
        assert type_name(value) in error.message


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"a": 1,}', "not valid JSON"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": -Infinity}', "-Infinity is not a JSON number"),
        (b"[1]", "must be a JSON object, not an array"),
        (b'"text"', "must be a JSON object, not a string"),
        (b"null", "must be a JSON object, not null"),
        (b"17", "must be a JSON object, not a number"),
        (b'{"a": "\xff"}', "not valid UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', "not valid UTF-8"),
        ('{"a": "\\ud800"}'.encode("utf-16"), "not valid UTF-8"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a":' + b"[" * 100_000, "nested too deeply"),
        (b'{"a":' + b"[" * 1300 + b'"\\ud83d\\udc1f"' + b"]" * 1300 + b"}", "nested too deeply"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused_in_a_sentence(raw, expected):
    error = refusal(lambda: parse_body(raw))
    assert expected in error.message
    assert error.param is None


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (rb'{"a": "x\ud800y"}', {"a": "x\ufffdy"}),
        (rb'{"a": "\udc1f\ud83d"}', {"a": "\ufffd\ufffd"}),
        (rb'{"a": "\ud83d\udc1f\ud83d"}', {"a": "\U0001f41f\ufffd"}),
        (
            rb'{"messages": [{}, {"content": ["x", "\uDFFF"]}]}',
            {"messages": [{}, {"content": ["x", "\ufffd"]}]},
        ),
        (rb'{"metadata": {"b\ud800": {"c": "\ud800"}}}', {"metadata": {"b\ufffd": {"c": "\ufffd"}}}),
        (rb'{"\ud800": 1}', {"\ufffd": 1}),
    ],
)
def test_each_half_of_a_surrogate_pair_becomes_a_replacement_character(raw, expected):
    assert parse_body(raw).data == expected


def test_a_body_tells_which_items_of_its_arrays_had_halves():
    raw = rb'{"messages": [{"a": "\ud83d\udc1f"}, {"a": "\ud83d"}, "\ud83d", 1], "stop": "\ud83d"}'
    assert parse_body(raw).mended == {"messages[1]", "messages[2]"}
    assert parse_body(b'{"messages": [{"a": "b"}]}').mended == frozenset()


def test_a_whole_surrogate_pair_and_a_byte_order_mark_are_text():
    assert parse_body(rb'{"a": "\ud83d\udc1f"}').text("a") == "🐟"
    assert parse_body(b'\xef\xbb\xbf{"a": 1}').value("a") == 1


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.booleans() | st.none()))
def test_any_object_is_read_as_it_was_sent(content):
    for escaped in (True, False):
        assert parse_body(json.dumps(content, ensure_ascii=escaped).encode()).data == content


@given(value=st.integers() | st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_is_taken_exactly_if_it_is_in_its_range(value):
    fields = body(x=value)
    if 0 <= value <= 10:
        assert fields.number("x", TEN) == value
    else:
        assert refusal(lambda: fields.number("x", TEN)).message == "'x' must be from 0 to 10."


@pytest.mark.parametrize(
    "digits", ["9" * 400, "-" + "9" * 400, "9" * 5000, "1e308", "1e999", str(2**63), str(-(2**63) - 1)]
)
def test_a_huge_number_is_out_of_range_like_any_other(digits):
    fields = parse_body(b'{"x": ' + digits.encode() + b"}")
    for read in (fields.number, fields.integer):
        assert "'x' must be from" in refusal(lambda read=read: read("x", SEED_RANGE)).message


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63), 0])
def test_integers_keep_every_bit(value):
    assert body(x=value).integer("x", SEED_RANGE) == value


def test_a_whole_float_is_an_integer_and_a_fraction_is_none():
    number = body(x=3.0).integer("x", TEN)
    assert number == 3
    assert isinstance(number, int)
    assert refusal(lambda: body(x=3.5).integer("x", TEN)).message == "'x' must be a whole number."


def test_zero_and_false_are_values_and_not_absent():
    assert body(x=0).number("x", TEN) == 0
    assert body(x=0).integer("x", TEN) == 0
    assert body(x=False).boolean("x", default=True) is False
    assert body().boolean("x", default=True) is True
    assert body(x="").text("x") == ""


def test_required_text_may_not_be_empty():
    assert body(x="a").required_text("x") == "a"
    for fields in (body(), body(x=None), body(x="")):
        assert refusal(lambda fields=fields: fields.required_text("x")).param == "x"
    assert "a string, not a number" in refusal(lambda: body(x=1).required_text("x")).message


def test_paths_lead_through_objects_and_arrays():
    fields = body(a={"b": [{}, {"c": {"d": 1}}]})
    inner = fields.object("a")
    assert inner is not None
    second = list(inner.objects("b"))[1]
    last = second.object("c")
    assert last is not None
    error = refusal(lambda: last.text("d"))
    assert error.param == "a.b[1].c.d"
    assert error.message == "'a.b[1].c.d' must be a string, not a number."


def test_an_item_of_the_wrong_type_is_named_by_its_index():
    assert (
        refusal(lambda: list(body(x=[{}, "a"]).objects("x"))).message
        == "'x[1]' must be an object, not a string."
    )
    error = refusal(lambda: body(x=["a", None]).texts("x"))
    assert (error.param, error.message) == ("x[1]", "'x[1]' must be a string, not null.")


def test_one_string_and_a_list_of_strings_read_alike():
    assert body(x="a").texts("x") == body(x=["a"]).texts("x") == ("a",)
    assert body(x=[]).texts("x") == ()
    assert body(x=["b", "a"]).texts("x") == ("b", "a")


def test_fields_that_nobody_asks_for_are_never_looked_at():
    fields = body(x="a", y=[{"deep": {}}], z=None)
    assert fields.text("x") == "a"


@pytest.mark.parametrize(
    "text",
    ["", "{", "NaN", '{"a": Infinity}', "[" * 100_000],
)
def test_embedded_json_that_is_none_reads_as_nothing(text):
    assert parse_embedded(text) is None


def test_embedded_json_of_millions_of_values_reads_as_nothing_and_holds_nobody_up():
    text = "[" + "[]," * MOST_VALUES + "1]"
    began = time.thread_time()
    assert parse_embedded(text) is None
    assert time.thread_time() - began < 0.2


def test_halves_in_embedded_json_are_replaced_like_those_of_the_body():
    assert parse_embedded('{"a": "\\ud800", "\\udc00": 1}') == {"a": "\ufffd", "\ufffd": 1}


def test_embedded_json_is_read():
    assert parse_embedded(' {"a": ["\\ud83d\\udc1f", 1.5, null]} ') == {"a": ["🐟", 1.5, None]}


@pytest.mark.parametrize("digits", ["1e400", "-1e400", "9" * 5000, "-" + "9" * 5000])
def test_a_number_beyond_all_others_can_be_written_down_again(digits: str):
    value = parse_body(f'{{"a": [{digits}]}}'.encode()).data["a"]
    assert json.loads(json.dumps(value, allow_nan=False)) == [
        math.copysign(sys.float_info.max, float(digits))
    ]
