"""What JSON a grammar lets a model write, byte by byte: escapes, and white space between tokens of JSON."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from start_llm.core.chat import JsonAnswer, OutputConstraint
from start_llm.core.errors import ConstraintViolated
from start_llm.core.events import CallArguments
from start_llm.core.family import Family
from start_llm.formats.reading.schema import Tools
from start_llm.formats.registry import NOTATIONS
from start_llm.formats.writing.call_text import CallText, JsonArguments
from start_llm.formats.writing.callable_tool import CallableTool
from start_llm.formats.writing.lark import Grammar, Lark
from start_llm.output.grammar.enforcer import Enforcer, TokenGuide
from start_llm.output.grammar.reply_grammar import ReplyContext, reply_grammar
from start_llm.output.splitter import make_splitter

END = 256
LONGEST_RUN = 33
"""A line break with an indentation of 32 blanks."""
VALUE: dict[str, Any] = {"a": "X", "b": ["X", 1.5, {}], "c": {"d": [True, None]}}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "string"},
        "b": {"type": "array"},
        "c": {"type": "object", "properties": {"d": {"type": "array"}}, "required": ["d"]},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {"any object": {"type": "object"}, "a schema": SCHEMA}
LONG_TEXT: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 2}},
    "additionalProperties": False,
}
WRITTEN = {name: notation.text for name, notation in NOTATIONS.items() if notation.text}
JSON_CALLS = {name: text for name, text in WRITTEN.items() if isinstance(text.arguments, JsonArguments)}
ESCAPED = [r"\u00e9", r"\u00E9", r"\ud83d\ude00", r"\uD83D\uDE00", r"a\u4e2d\u6587b", r"\"\\\n\t\u0007"]
NO_CHARACTER = [r"\ud83d", r"\ude00", r"\ude00\ud83d", r"\ud83d\u00e9", r"\ud83d \ude00", r"\u12g4", r"\x41"]


class Bytes:
    """A vocabulary of the single bytes and an end."""

    eos_token_ids = frozenset({END})
    control_tokens: Mapping[str, int] = {}

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < END else b"<end>"

    def encode(self, text: str, *, as_document: bool) -> list[int]:
        del as_document
        return list(text.encode())


ENFORCER = Enforcer(Bytes(), END + 1)


def of_answer(schema: Mapping[str, Any]) -> Grammar:
    form = OutputConstraint(answer=JsonAnswer(schema=schema, field="text.format.schema"), calls="none")
    context = ReplyContext(
        family=Family(name="plain", formats=()),
        template="",
        reasoning_is_open=False,
        thinking=False,
        begins_with_space=False,
    )
    return reply_grammar(form, (), context, Lark({}))


def of_call(text: CallText) -> Grammar:
    lark = Lark({})
    return lark.grammar(text.expression(lark, [CallableTool("f", SCHEMA)], one_call=True))


def allows(grammar: Grammar, text: str) -> bool:
    """The text is a whole reply."""
    try:
        guide = at(grammar, text)
    except ConstraintViolated:
        return False
    return guide.allowed()[END] > 0


def at(grammar: Grammar, text: str) -> TokenGuide:
    guide = ENFORCER.guide(grammar)
    for byte in text.encode():
        guide.advance([byte])
    return guide


def longest_run(grammar: Grammar, text: str, wish: str) -> int:
    """White space that may follow a text, whichever of these characters it prefers, the first ones most."""
    guide, length = at(grammar, text), 0
    while length <= 10 * LONGEST_RUN:
        allowed = guide.allowed()
        preferred = next((sign for sign in wish if allowed[ord(sign)]), None)
        if preferred is None:
            break
        guide.advance([ord(preferred)])
        length += 1
    return length


def between_tokens(text: str) -> Iterator[str]:
    """The beginnings of a JSON text that do not end in one of its texts."""
    ends = (end for end in range(len(text) + 1) if text[:end].count('"') % 2 == 0)
    return (text[:end] for end in ends)


def in_call(text: CallText, arguments: str) -> str:
    """A call with these arguments in place of what it would write."""
    return text.write([("f", VALUE)]).replace(json.dumps(VALUE), arguments)


def heard(notation: str, call: str) -> dict[str, Any]:
    """The arguments of a call as a client gets them."""
    family = Family(name="of one notation", formats=(notation,))
    splitter = make_splitter(
        family, Tools([CallableTool("f", SCHEMA).definition]), reasoning_is_open=False, thinking=False
    )
    outputs = [*splitter.feed(call), *splitter.close(complete=True)]
    return json.loads("".join(output.text for output in outputs if isinstance(output, CallArguments)))


# -------------------------------------------------------------------------------------------------- escapes


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("escaped", ESCAPED)
def test_an_answer_may_spell_any_character_as_an_escape(schema: str, escaped: str):
    text = json.dumps(VALUE).replace("X", escaped)
    assert json.loads(text), "it is JSON"
    assert allows(of_answer(SCHEMAS[schema]), text)


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("escaped", NO_CHARACTER)
def test_an_answer_has_no_half_of_a_surrogate_pair_and_no_escape_that_json_does_not_have(schema, escaped):
    assert not allows(of_answer(SCHEMAS[schema]), json.dumps(VALUE).replace("X", escaped))


def test_a_key_that_no_schema_lists_may_be_spelled_with_escapes_and_is_no_half_either():
    anything = of_answer({"type": "object"})
    assert allows(anything, r'{"\u00e9\ud83d\ude00": 1}')
    assert not allows(anything, r'{"\ud83d": 1}')


def test_a_pair_counts_as_the_one_character_that_it_is():
    short = of_answer(LONG_TEXT)
    assert allows(short, r'{"a": "\ud83d\ude00\u00e9"}')
    assert not allows(short, r'{"a": "\ud83d\ude00\u00e9\u00e9"}')


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", WRITTEN)
def test_texts_of_json_in_calls_of_every_notation_may_have_escapes(name: str):
    """Where texts stand between tags or marks, those in lists are JSON."""
    text = WRITTEN[name]
    template = text.write([("f", VALUE)]).replace("'", '"').replace("None", "null").replace("True", "true")
    if '"X"' not in template:
        pytest.skip("texts of this notation are never JSON")
    grammar = of_call(text)
    for escaped in ESCAPED:
        call = template.replace('"X"', f'"{escaped}"')
        assert allows(grammar, call), escaped
        assert heard(name, call)["b"][0] == json.loads(f'"{escaped}"')
    for escaped in NO_CHARACTER:
        assert not allows(grammar, template.replace('"X"', f'"{escaped}"')), escaped


# ---------------------------------------------------------------------------------------------- white space


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("indent", [None, 0, 1, 2, 3, 4, 8, "\t"])
def test_an_answer_may_be_indented(schema: str, indent: Any):
    assert allows(of_answer(SCHEMAS[schema]), json.dumps(VALUE, indent=indent))


@pytest.mark.parametrize("indent", [2, 4, "\t"])
def test_an_answer_may_be_indented_where_it_is_deep(indent: Any):
    deep: Any = 1
    for _ in range(8):
        deep = {"a": deep}
    assert allows(of_answer({"type": "object"}), json.dumps(deep, indent=indent))


def test_an_answer_may_have_no_white_space_or_blanks_on_both_sides():
    answer = of_answer(SCHEMA)
    assert allows(answer, json.dumps(VALUE, separators=(",", ":")))
    assert allows(answer, json.dumps(VALUE, separators=(" ,  ", " :  ")))


@pytest.mark.parametrize("wish", [" \n\t", "\n \t", "\t\n ", "\n\t ", "\r\n\t "])
@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.sample(5)
def test_white_space_in_an_answer_has_an_end(schema: str, wish: str):
    answer = of_answer(SCHEMAS[schema])
    for prefix in between_tokens(json.dumps(VALUE, separators=(",", ":"))):
        assert longest_run(answer, prefix, wish) <= LONGEST_RUN, prefix


@pytest.mark.sample(28)
@pytest.mark.parametrize("name", JSON_CALLS)
def test_the_arguments_of_a_call_may_be_indented_and_their_white_space_has_an_end(name: str):
    text = JSON_CALLS[name]
    grammar = of_call(text)
    for indent in (None, 2, 4, "\t"):
        assert allows(grammar, in_call(text, json.dumps(VALUE, indent=indent)))
    before = in_call(text, "HERE").partition("HERE")[0]
    for prefix in between_tokens(json.dumps(VALUE, separators=(",", ":"))):
        for wish in (" \n\t", "\n\t "):
            assert longest_run(grammar, before + prefix, wish) <= LONGEST_RUN, prefix
