"""The text of a custom call is sent as its arguments come, and never taken back."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.protocols.custom_tools import CustomInput, custom_input


def pieces_of(arguments: str, cuts: list[int]) -> list[str]:
    places = sorted({min(cut, len(arguments)) for cut in cuts})
    return [arguments[start:end] for start, end in zip([0, *places], [*places, len(arguments)], strict=True)]


def read(pieces: list[str]) -> str:
    reader = CustomInput()
    return "".join([*(reader.feed(piece) for piece in pieces), reader.finish()])


@pytest.mark.thorough
@given(st.text(), st.booleans(), st.lists(st.integers(0, 200), max_size=6))
def test_the_text_is_the_same_however_its_arguments_are_cut(text, ascii_only, cuts):
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    assert read(pieces_of(arguments, cuts)) == read(list(arguments)) == custom_input(arguments) == text


@given(st.text(alphabet='{}"input: \\u0d83e\n5[]', max_size=40), st.lists(st.integers(0, 60), max_size=4))
def test_whatever_the_arguments_are_their_text_does_not_depend_on_the_cuts(arguments, cuts):
    for whole in (arguments, f'{{"input": "{arguments}'):
        assert read(pieces_of(whole, cuts)) == custom_input(whole)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [('{"input": "\\"\n"}', '"\n'), ('{"input": "\\q\\""}', '\\q"'), ('{"input": "\\"\n', '"\n')],
)
def test_what_json_forbids_changes_nothing_around_it(arguments, text):
    """A line break as it is, and an escape that is none."""
    assert read(list(arguments)) == custom_input(arguments) == text


def test_text_goes_out_with_the_piece_that_makes_it_certain():
    reader = CustomInput()
    fed = [reader.feed(piece) for piece in ('{"inp', 'ut": "a', "\\", "nb\\ud8", "3d", "\\ude00c", '"', "}")]
    assert fed == ["", "a", "", "\nb", "", "\U0001f600c", "", ""]
    assert reader.finish() == ""


def test_half_a_character_is_one_that_every_client_can_read():
    assert custom_input('{"input": "\\ud83d x"}') == "\ufffd x"


@pytest.mark.parametrize("arguments", ['{"text": "x"}', '{"input": 5}', '"x"', "[]", "", '{"inp'])
def test_arguments_of_another_form_are_the_text_once_they_are_whole(arguments):
    reader = CustomInput()
    assert "".join(map(reader.feed, arguments)) == ""
    assert reader.finish() == arguments


def test_the_input_behind_another_argument_is_the_text_too():
    assert read(list('{"x": 1, "input": "a"}')) == "a"
