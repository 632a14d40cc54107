"""Calls whose arguments are almost JSON are calls, in every format whose calls are objects of JSON."""

import json

import pytest

from start_llm.formats.reading.almost_json import almost_json
from tests.output.corpus.case import Case, outcome_of, split
from tests.output.corpus.writers import WRITERS

MARKED = "MARKED"
JSON = sorted(
    name
    for name, writer in WRITERS.items()
    if f'{{"text": "{MARKED}"}}' in writer.call("write", text=MARKED) and not writer.family.channels
)
ENDS = {name: WRITERS[name].call("write", text=MARKED).split(f'{{"text": "{MARKED}"}}')[1] for name in JSON}
ALMOST = {
    "an expression": (r'{"text": "\d+\.\w"}', r"\d+\.\w"),
    "an expression with a word's border": (r'{"text": "\bfoo\d"}', r"\bfoo\d"),
    "code with line breaks": (r'{"text": "import re\nre.match(\"\d\")\n"}', 'import re\nre.match("\\d")\n'),
    "a path": (r'{"text": "C:\Users\new"}', "C:\\Users\\new"),
    "a comma too many": ('{"text": "x",}', "x"),
    "single quotes": ("{'text': 'say \"}\"'}", 'say "}"'),
    "comments": ('{/* } */ "text": "x" // {\n}', "x"),
    "no quotes around a name": ('{text: "x"}', "x"),
    "no number": ('{"text": NaN}', "NaN"),
    "a truth of Python": ('{"text": "x", "more": [True, None]}', "x"),
}


def parsed(name: str, arguments: str, end: str = ""):
    text = WRITERS[name].call("write", text=MARKED).replace(f'{{"text": "{MARKED}"}}', arguments)
    case = Case(name="almost", text=text.removesuffix(end), family=WRITERS[name].family)
    whole = split(case, [case.text])
    assert split(case, case.text) == whole
    return outcome_of(whole)


@pytest.mark.parametrize("name", JSON)
@pytest.mark.parametrize("what", ALMOST)
def test_arguments_that_are_almost_json_are_what_they_can_only_mean(name, what):
    arguments, text = ALMOST[what]
    outcome = parsed(name, arguments)
    assert [(tool, json.loads(given)["text"]) for tool, given in outcome.closed_calls] == [("write", text)]
    assert outcome.content == ""


@pytest.mark.parametrize("name", JSON)
def test_a_call_without_its_last_brace_is_one_if_its_block_or_the_reply_ends_there(name):
    for outcome in (parsed(name, '{"text": "x"'), parsed(name, '{"text": "x"', ENDS[name])):
        assert [(tool, json.loads(given)) for tool, given in outcome.closed_calls] == [
            ("write", {"text": "x"})
        ]
        assert outcome.content == ""


@pytest.mark.parametrize("name", JSON)
@pytest.mark.parametrize(
    "arguments",
    [
        r'{"text": "src\utils\new"}',
        "{'text': 'it's'}",
        '{"text": x}',
        '{"text": "x" "more": 1}',
        '{"text": }',
        '{"text": ["x"}',
        '{"text": ' + "[" * 80 + "]" * 80 + ",}",
    ],
)
def test_arguments_with_no_or_several_readings_are_no_call(name, arguments):
    outcome = parsed(name, arguments)
    assert not outcome.calls
    assert arguments.split(":")[0] in outcome.content


@pytest.mark.parametrize("text", ["", "{", '{"a": [1,', '{"a":', '{"a": {', '{"a": 1} b', "[1] {"])
def test_a_text_that_breaks_off_before_a_value_is_refused(text):
    with pytest.raises(ValueError):
        almost_json(text)


@pytest.mark.parametrize(
    "text", ['{"a": [1, {"b": "c"', '{"a": [1, {"b": "c"}', '{"a": [1, {"b": "c"}] // so']
)
def test_missing_brackets_close_at_the_end(text):
    assert json.loads(almost_json(text)) == {"a": [1, {"b": "c"}]}
