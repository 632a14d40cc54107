"""Every demand of a request holds, whatever the model says: in every family, by chance."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from start_llm.core.chat import ChatRequest, JsonAnswer, Message, OutputConstraint
from start_llm.core.errors import ConstraintViolated, InvalidRequest, Overloaded
from start_llm.core.events import CallStarted, Content, Finished, Output, Text, Usage
from start_llm.core.family import Family
from start_llm.core.prompt import ModelTokens, Prompt
from start_llm.core.unenforced import KEYWORDS, unenforced_keywords
from start_llm.formats import registry
from start_llm.formats.registry import FAMILIES, NOTATIONS
from start_llm.formats.writing.lark import Lark
from start_llm.output.grammar.schema_check import schema_error
from start_llm.output.stream import OutputStream
from start_llm.output.structured_output import StructuredOutput
from tests.http.forms import ALWAYS_THINKING, OTHER, PATH, THINKING, TOOLS, Call
from tests.http.forms import FORMS as SWITCHED
from tests.output.structured_replies import Reply, reply
from tests.templates.traits import TRAITS, trait_tokenizer

pytestmark = pytest.mark.sample(5)

FORMS = {**SWITCHED, **ALWAYS_THINKING}
EVERY = list(FORMS)
SEEDS = range(3)
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["x"],
    "additionalProperties": False,
}
SORT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a b", 'c"d', "</parameter>\n"]},
        "count": {"type": ["integer", "null"]},
        "places": {"type": "array", "items": {"$ref": "#/$defs/place"}, "maxItems": 2},
        "is_long": {"type": "boolean"},
        "anything": {},
    },
    "required": ["kind", "is_long"],
    "$defs": {"place": PLACE},
}
COMPOSED: dict[str, Any] = {
    "$ref": "#/definitions/Store",
    "definitions": {
        "Store": {
            "type": "object",
            "allOf": [{"properties": {"path": {"type": "string"}}, "required": ["path"]}],
            "anyOf": [
                {"properties": {"text": {"type": "string"}}, "required": ["text"]},
                {"properties": {"count": {"type": "integer"}}, "required": []},
            ],
        }
    },
}
PAINT: dict[str, Any] = {
    "type": ["object", "null"],
    "properties": {
        "color": {"allOf": [{"$ref": "#/$defs/A%20color"}], "default": "red"},
        "shade": {"anyOf": [{"$ref": "#/$defs/A%20color"}, {"type": "null"}]},
        "first": {"$ref": "#/properties/shade/anyOf/0"},
        "mode": {"type": ["string", "null"], "enum": ["wet", None]},
        "kind": {"oneOf": [{"const": "oil"}, {"const": "ink"}]},
        "size": {"allOf": [{"$ref": "#/$defs/Size"}]},
        "sizes": {"type": "array", "items": {"$ref": "#/properties/size"}},
        "fixed": {"const": {"k": "v", "l": ["a", 1, None]}},
        "spot": {
            "allOf": [
                {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
                {"properties": {"y": {"type": "integer"}}, "required": ["y"]},
            ]
        },
    },
    "required": ["color", "shade", "first", "mode", "kind", "size", "sizes", "fixed", "spot"],
    "additionalProperties": False,
    "$defs": {"A color": {"type": "string", "enum": ["red", "green"]}, "Size": {"type": "integer"}},
}
TREE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "leaf": {"type": "integer"},
        "tree": {
            "type": "object",
            "properties": {"inner": {"$ref": "#/properties/tree"}, "leaf": {"$ref": "#/properties/leaf"}},
            "required": ["leaf"],
            "additionalProperties": False,
        },
    },
    "required": ["tree"],
}
OFFERED: list[Any] = [
    *TOOLS,
    {"type": "function", "function": {"name": "sort-it.2", "parameters": SORT}},
    {"type": "function", "function": {"name": "nothing"}},
    {"type": "function", "function": {"name": "LOOKUP_NUMBER_NAME", "parameters": PLACE}},
    {"type": "function", "function": {"name": "store", "parameters": COMPOSED}},
    {"type": "function", "function": {"name": "paint", "parameters": PAINT}},
]
CALL = '<tool_call>{"name": "nothing", "arguments": {}}</tool_call>'
TITLE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 20},
        "call": {"enum": [CALL, None]},
        "depths": {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 5}, "maxItems": 3},
    },
    "required": ["title", "call"],
    "additionalProperties": False,
}
ANSWER = JsonAnswer(schema=TITLE, field="response_format.json_schema.schema")


QUOTES_MARKS = JsonAnswer(
    schema={
        "type": "object",
        "properties": {"mark": {"enum": ["<|END_RESPONSE|>", "<|close|>response<|sep|>", "a"]}},
        "required": ["mark"],
        "additionalProperties": False,
    },
    field="response_format",
)
AROUND_ANSWER = [
    ("numbered_actions", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ("open_and_close", "<|open|>response<|sep|>", "<|close|>response<|sep|><|close|>message<|sep|>"),
]


def answer_in_pieces(trait: str, reply: str, length: int, *, complete: bool = True) -> str:
    """The answer of a reply that is held to its form."""
    request = ChatRequest(
        messages=(Message(role="user", content="?"),),
        form=OutputConstraint(answer=QUOTES_MARKS, calls="none"),
    )
    splitter = keeper(trait).splitter(request, Prompt(tokens=ModelTokens((0,)), thinking=False))
    pieces = [reply[start : start + length] for start in range(0, len(reply), length)]
    events = [event for piece in pieces for event in splitter.feed(piece)] + splitter.close(complete)
    return "".join(event.text for event in events if isinstance(event, Content))


def check_calls(heard: Reply) -> None:
    """Calls of offered tools, and nothing beside them."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in OFFERED}
    assert heard.calls, heard.text
    assert heard.content == ""
    for name, arguments in heard.calls:
        jsonschema.validate(json.loads(arguments), schemas[name])


def ended(name: str, form: OutputConstraint, **options: Any) -> list[Reply]:
    """Replies that came to their end, by several chances; some have to."""
    heard = [reply(FORMS[name].trait, form, OFFERED, seed=seed, **options) for seed in SEEDS]
    whole = [attempt for attempt in heard if attempt.ended]
    assert whole, heard
    return whole


@pytest.mark.sample(20)
@pytest.mark.parametrize("one_call", [True, False], ids=["one", "several"])
@pytest.mark.parametrize("name", EVERY)
def test_a_call_that_is_demanded_is_made(name, one_call):
    for heard in ended(name, OutputConstraint(calls="must", one_call=one_call)):
        check_calls(heard)
        assert len(heard.calls) == 1 or not one_call


@pytest.mark.sample(32)
@pytest.mark.parametrize("notation", [name for name, attempt in NOTATIONS.items() if attempt.text])
def test_a_call_can_be_demanded_in_every_notation(notation: str):
    family = Family(name="of one notation", formats=(notation,))
    form = OutputConstraint(calls="must", tools=frozenset({"sort-it.2"}), one_call=True)
    heard = [reply("plain", form, OFFERED, seed=seed, max_tokens=800, family=family) for seed in range(6)]
    whole = [attempt for attempt in heard if attempt.ended]
    assert whole, heard
    for attempt in whole:
        check_calls(attempt)
        assert NOTATIONS[notation].bare or attempt.text.lstrip().startswith(NOTATIONS[notation].openers)


@pytest.mark.sample(20)
@pytest.mark.parametrize("chosen", ["sort-it.2", "LOOKUP_NUMBER_NAME", "store", "paint"])
@pytest.mark.parametrize("name", EVERY)
def test_the_tool_that_is_named_is_called(name, chosen):
    form = OutputConstraint(calls="must", one_call=True, tools=frozenset({chosen}))
    for heard in ended(name, form, max_tokens=800):
        check_calls(heard)
        assert [called for called, _ in heard.calls] == [chosen]


@pytest.mark.parametrize("name", [name for name in EVERY if name != "gemma4"])
def test_an_argument_may_have_parts_like_itself(name):
    """Gemma 4's notation is held to a few levels."""
    tool: Any = {"type": "function", "function": {"name": "plant", "parameters": TREE}}
    form = OutputConstraint(calls="must", one_call=True, tools=frozenset({"plant"}))
    heard = [reply(FORMS[name].trait, form, [tool], seed=seed, max_tokens=800) for seed in SEEDS]
    planted = [json.loads(arguments) for attempt in heard if attempt.ended for _, arguments in attempt.calls]
    assert planted
    for arguments in planted:
        jsonschema.validate(arguments, TREE)


@pytest.mark.sample(10)
@pytest.mark.parametrize("calls", ["may", "none"])
@pytest.mark.parametrize("name", EVERY)
def test_an_answer_follows_its_schema_and_what_stands_in_it_is_no_call(name, calls):
    answers = 0
    for heard in ended(name, OutputConstraint(answer=ANSWER, calls=calls)):
        if heard.calls and calls == "may":
            check_calls(heard)
            continue
        jsonschema.validate(json.loads(heard.content), TITLE)
        assert not heard.calls
        answers += 1
    assert answers or calls == "may"


@pytest.mark.parametrize("name", EVERY)
def test_any_object_is_an_object(name):
    form = OutputConstraint(
        answer=JsonAnswer(schema={"type": "object"}, field="response_format"), calls="none"
    )
    for heard in ended(name, form):
        assert isinstance(json.loads(heard.content), dict)


@pytest.mark.sample(10)
@pytest.mark.parametrize("is_open", [True, False], ids=["open", "may be opened"])
@pytest.mark.parametrize("name", [*THINKING, *ALWAYS_THINKING])
def test_reasoning_is_free_and_the_form_follows_it(name, is_open):
    forms = [OutputConstraint(calls="must", one_call=True), OutputConstraint(answer=ANSWER, calls="none")]
    reasoning_texts: list[str] = []
    for form in forms:
        for heard in ended(name, form, reasoning_is_open=is_open, thinking=True, max_tokens=800):
            reasoning_texts.append(heard.reasoning)
            if form.answer:
                jsonschema.validate(json.loads(heard.content), TITLE)
            else:
                check_calls(heard)
    assert any(reasoning_texts)


@pytest.mark.parametrize(("trait", "opening", "closing"), AROUND_ANSWER)
def test_an_answer_may_stand_between_the_marks_of_its_model(trait, opening, closing):
    form = OutputConstraint(answer=QUOTES_MARKS, calls="none")
    heard = [reply(trait, form, seed=seed) for seed in range(12)]
    whole = [attempt for attempt in heard if attempt.ended]
    assert {attempt.text.startswith(opening) for attempt in whole} == {True, False}
    for attempt in whole:
        assert attempt.text.endswith(closing) == attempt.text.startswith(opening)
        jsonschema.validate(json.loads(attempt.content), QUOTES_MARKS.schema)


@pytest.mark.parametrize(("trait", "opening", "closing"), AROUND_ANSWER)
@pytest.mark.parametrize("length", [1, 7, 1_000])
def test_marks_that_an_answer_quotes_are_its_own(trait, opening, closing, length):
    answer = json.dumps({"mark": closing, "other": opening})
    for written in (opening + answer + closing, answer):
        assert answer_in_pieces(trait, written, length) == answer


@pytest.mark.parametrize(("trait", "opening", "closing"), AROUND_ANSWER)
def test_an_answer_that_was_cut_in_a_mark_has_nothing_of_it(trait, opening, closing):
    assert answer_in_pieces(trait, opening[:5], 1, complete=False) == ""
    assert (
        answer_in_pieces(trait, f'{opening}{{"mark": "a"}}{closing[:5]}', 1, complete=False)
        == '{"mark": "a"}'
    )
    assert answer_in_pieces(trait, f'{opening}{{"mark": "<', 1, complete=False) == '{"mark": "<'


# ------------------------------------------------------------------------------------------- what is reported


def reported_calls(name: str, form: OutputConstraint, *called: Call) -> list[Output]:
    """Return calls as a client hears of them, from the words of a family."""
    request = ChatRequest(messages=(Message(role="user", content="?"),), tools=tuple(TOOLS), form=form)
    prompt = Prompt(tokens=ModelTokens((0,)), thinking=False)
    splitter = keeper(FORMS[name].trait).splitter(request, prompt)
    stream = OutputStream(splitter, max_calls=1 if form.one_call else None)
    outputs = stream.feed(Text(FORMS[name].calls(*called).removesuffix(FORMS[name].end), (1, 2)))
    rest, _ = stream.close(Finished("stop", Usage(1, 0, 2)))
    return [*outputs, *rest]


@pytest.mark.parametrize("name", EVERY)
def test_where_calls_are_forbidden_none_is_reported(name):
    for form in (OutputConstraint(calls="none"), OutputConstraint(tools=frozenset())):
        assert not any(isinstance(output, CallStarted) for output in reported_calls(name, form, PATH))
    assert any(isinstance(output, CallStarted) for output in reported_calls(name, OutputConstraint(), PATH))


@pytest.mark.parametrize("name", [name for name in EVERY if FORMS[name].between is not None])
def test_where_one_call_is_the_limit_no_other_is_reported(name):
    def calls(form: OutputConstraint) -> int:
        return sum(isinstance(output, CallStarted) for output in reported_calls(name, form, PATH, OTHER))

    assert (calls(OutputConstraint()), calls(OutputConstraint(one_call=True))) == (2, 1)


# -------------------------------------------------------------------------------------------- what is refused


def keeper(trait: str = "strips_old_reasoning") -> StructuredOutput:
    tokenizer = trait_tokenizer(trait)
    family = registry.detect({}, tokenizer.chat_template, tokenizer.added_tokens)
    return StructuredOutput(tokenizer, family, TRAITS[trait].vocabulary)


def asked(form: OutputConstraint, *tools: Any, trait: str = "strips_old_reasoning") -> Any:
    request = ChatRequest(messages=(Message(role="user", content="?"),), tools=tools, form=form)
    return keeper(trait).guide(request, Prompt(tokens=ModelTokens((0,)), thinking=False))


def test_a_free_form_needs_no_guide():
    free = (
        OutputConstraint(),
        OutputConstraint(calls="none"),
        OutputConstraint(one_call=True),
        OutputConstraint(tools=frozenset("a")),
    )
    assert [asked(form, *TOOLS) for form in free] == [None] * 4


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "string", "not": {"const": "a"}}, "not"),
        ({"type": "shoe"}, "shoe"),
        ({"$ref": "#/$defs/nowhere"}, "nowhere"),
        ({"$ref": "https://example.org/a.json"}, "example.org"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "'a'"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_with_the_reason(schema, reason):
    with pytest.raises(InvalidRequest) as refused:
        answer = JsonAnswer(schema=schema, field="text.format.schema", is_strict=True)
        asked(OutputConstraint(answer=answer))
    assert refused.value.param == "text.format.schema"
    assert reason in refused.value.message
    assert "start:" not in refused.value.message, "the grammar is ours"


def test_what_a_client_says_about_the_library_counts_for_nothing():
    schema: Any = {"type": "object", "not": {}, "x-guidance": {"lenient": True, "whitespace_flexible": True}}
    with pytest.raises(InvalidRequest):
        asked(OutputConstraint(answer=JsonAnswer(schema=schema, field="f", is_strict=True)))


def chain(length: int, step: Any) -> dict[str, Any]:
    """Definitions, each of which refers to the next one."""
    links = {f"a{n}": step({"$ref": f"#/$defs/a{n + 1}"}) for n in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": links | {f"a{length}": {"type": "string"}}}


STEPS: dict[str, Any] = {
    "arrays": lambda link: {"type": "array", "minItems": 1, "items": link},
    "all of one": lambda link: {"allOf": [link]},
    "references": lambda link: link,
    "objects": lambda link: {"type": "object", "properties": {"a": link, "b": link}, "required": ["a"]},
}


CIRCLE = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"oneOf": [{"type": "string", "format": "date"}, {"type": "string"}]}, "oneOf is not supported"),
        (CIRCLE, "lead in a circle"),
    ],
)
def test_a_refusal_has_no_word_of_the_library(schema: Any, reason: str):
    with pytest.raises(InvalidRequest, match=reason) as refused:
        asked(OutputConstraint(answer=JsonAnswer(schema=schema, field="f", is_strict=True)))
    for word in ("coerce_one_of", "NoExtensionBias"):
        assert word not in refused.value.message


VALUES: dict[str, Any] = {
    "$dynamicRef": "#a",
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {}},
}
VALUES |= {"uniqueItems": True, "minContains": 1, "maxContains": 1, "dependencies": {"a": ["b"]}}


@pytest.mark.parametrize("keyword", sorted(KEYWORDS))
def test_a_keyword_that_no_grammar_enforces_is_refused_if_strict_and_reported_otherwise(keyword):
    documents = (Path(__file__).parents[2] / "docs" / "structured-output.md").read_text(encoding="utf-8")
    schema: Any = {"type": ["array", "object"], keyword: VALUES.get(keyword, {"type": "string"})}
    with pytest.raises(InvalidRequest) as refused:
        asked(OutputConstraint(answer=JsonAnswer(schema=schema, field="f", is_strict=True)))
    assert keyword in refused.value.message
    assert f"`{keyword}`" in documents
    guide = asked(OutputConstraint(answer=JsonAnswer(schema=schema, field="f")))
    guide.advance(trait_tokenizer(FORMS["hermes"].trait).encode("{", as_document=False))
    assert unenforced_keywords({"items": [schema]}) == (keyword,)


@pytest.mark.parametrize(
    ("schema", "keywords"),
    [
        ({"properties": {"not": {"enum": [{"contains": 1}]}, "if": {}}, "default": {"not": 1}}, ()),
        ({"$defs": {"a": {"uniqueItems": True, "not": {}}}}, ("not", "uniqueItems")),
        (
            {"anyOf": [{"type": "string", "format": "binary"}, {"type": "string", "format": "date"}]},
            ("format",),
        ),
        ({"type": "integer", "format": "int64"}, ()),
        ({"oneOf": [{"type": "string", "format": "date"}, {"type": "string"}]}, ("oneOf",)),
        (chain(20_000, STEPS["arrays"]), ()),
    ],
    ids=lambda value: str(value)[:60],
)
def test_the_keywords_that_a_reply_may_break_are_named(schema, keywords):
    assert unenforced_keywords(schema) == keywords
    if schema.keys() != {"$ref", "$defs"}:
        assert asked(OutputConstraint(answer=JsonAnswer(schema=schema, field="f")))


NAMED: dict[str, tuple[dict[str, str], str]] = {
    "pointers": ({}, "#/$defs/a{}"),
    "anchors": ({"$anchor": "a{}"}, "#a{}"),
    "names": ({"$id": "http://kettle.org/a{}"}, "a{}"),
}
"""Of a chain: how each definition is named, and how the one before it refers to it."""
LONG = 300


def named_chain(way: str) -> dict[str, Any]:
    name, reference = NAMED[way]
    links: dict[str, Any] = {
        f"a{n}": {
            **{word: text.format(n) for word, text in name.items()},
            "type": "array",
            "items": {"$ref": reference.format(n + 1)},
        }
        for n in range(LONG)
    }
    end = {word: text.format(LONG) for word, text in name.items()} | {"type": "string"}
    return {"$id": "http://kettle.org/", "$ref": reference.format(0), "$defs": {**links, f"a{LONG}": end}}


def circle(definitions: int, depth: int) -> dict[str, Any]:
    """Definitions, each of which refers to both of its neighbours, entered at the far end."""
    definition: dict[str, Any] = {}
    for n in range(definitions):
        before: Any = {"$ref": f"#/$defs/a{max(n - 1, 0)}"}
        for _ in range(depth):
            before = {"type": "array", "items": before}
        after = {"$ref": f"#/$defs/a{min(n + 1, definitions - 1)}"}
        definition[f"a{n}"] = {"type": "array", "prefixItems": [after], "items": before}
    return {"$ref": f"#/$defs/a{definitions - 1}", "$defs": definition}


NESTED = {**{way: named_chain(way) for way in NAMED}, "circle": circle(30, 20)}
COMPILE = """
import json, sys, threading
from start_llm.formats.writing.lark import Lark, SchemaOrigin
from start_llm.output.grammar.enforcer import Enforcer

class Letters:
    eos_token_ids, control_tokens = frozenset({256}), {}
    def token_bytes(self, token): return bytes([token]) if token < 256 else b""
    def encode(self, text, *, as_document): return list(text.encode())

def compile():
    lark = Lark({})
    start = lark.schema(json.load(sys.stdin), SchemaOrigin("f", "the schema"), lenient=False)
    guide = Enforcer(Letters(), 257).guide(lark.grammar(start))
    guide.advance(b"[[[")
    print(len(guide.allowed()))

threading.stack_size(2**19)
thread = threading.Thread(target=compile)
thread.start()
thread.join()
"""


def test_without_room_for_the_stack_a_request_is_refused(monkeypatch: pytest.MonkeyPatch):
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(Overloaded, match="no 512 MiB of address space for a thread that compiles schemas"):
        asked(OutputConstraint(answer=JsonAnswer(schema={"type": "object"}, field="f")))


@pytest.mark.thorough
@pytest.mark.parametrize("name", NESTED)
def test_a_schema_of_any_levels_is_compiled_from_a_thread_with_a_small_stack(name: str):
    """A quarter of them end a thread with 512 KB, the whole process with it (lessons 43 and 398)."""
    root = Path(__file__).parents[2]
    schema = json.dumps(NESTED[name])
    ended = subprocess.run(
        [sys.executable, "-c", COMPILE], input=schema, capture_output=True, text=True, cwd=root, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "257\n", "")


@pytest.mark.parametrize("step", STEPS)
def test_a_chain_and_a_circle_of_definitions_are_enforced(step: str):
    circular: dict[str, Any] = {
        "$defs": {"a": {"anyOf": [STEPS[step]({"$ref": "#/$defs/a"}), {"type": "integer"}]}},
        "$ref": "#/$defs/a",
    }
    for schema in (chain(20, STEPS[step]), circular):
        assert asked(OutputConstraint(answer=JsonAnswer(schema=schema, field="f"))).allowed()


def test_a_schema_that_is_too_large_or_too_deep_is_refused():
    large: Any = {"type": "object", "properties": {f"p{i}": {"const": "x" * 100} for i in range(10_000)}}
    deep: dict[str, Any] = {}
    for _ in range(400):
        deep = {"type": "object", "properties": {"a": deep}}
    for schema in (large, deep):
        with pytest.raises(InvalidRequest) as refused:
            asked(OutputConstraint(answer=JsonAnswer(schema=schema, field="f")))
        assert refused.value.param == "f"


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("depth", [300, 1300])
@pytest.mark.parametrize("word", ["items", "const"])
def test_arguments_that_are_nested_too_deeply_are_refused(word: str, depth: int, name: str):
    """Gemma's notation and MiniMax-M3's say of the innermost ones nothing, and need not refuse them."""
    schema: Any = 1
    for _ in range(depth):
        schema = {"items": schema, "type": "array"} if word == "items" else [schema]
    argument = schema if word == "items" else {"const": schema}
    parameters = {"type": "object", "properties": {"a": argument}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "deep", "parameters": parameters}}
    try:
        guide = asked(OutputConstraint(calls="must"), tool, trait=FORMS[name].trait)
    except InvalidRequest as refused:
        assert (refused.param, "'deep'" in refused.message) == ("tools", True)
    else:
        assert name in ("gemma4", "minimax_m3") and guide is not None


@pytest.mark.thorough
@pytest.mark.parametrize("name", EVERY)
def test_a_hundred_tools_that_each_may_get_forty_arguments_can_be_demanded(name):
    properties = {f"argument_{number}": {"type": "string"} for number in range(40)}
    schema = {"type": "object", "properties": properties}
    tools = [
        {"type": "function", "function": {"name": f"tool_{number}", "parameters": schema}}
        for number in range(100)
    ]
    assert reply(FORMS[name].trait, OutputConstraint(calls="must"), tools, seed=1, max_tokens=1).text


def accepts(name: str, parameters: Any, text: str) -> bool:
    """Return whether a demanded call of the tool `f` may be written like this."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    guide = asked(OutputConstraint(calls="must"), tool, trait=FORMS[name].trait)
    tokens = trait_tokenizer(FORMS[name].trait).encode(text, as_document=False)
    return guide.count_allowed(tokens) == len(tokens)


@pytest.mark.parametrize(
    ("name", "number", "text"),
    [
        ("glm", "<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>", "</arg_value>"),
        ("qwen_xml", "<tool_call>\n<function=f>\n<parameter=k>\n", "\n</parameter>"),
    ],
)
def test_the_type_of_arguments_that_a_tool_does_not_name_is_enforced(name: str, number: str, text: str):
    parameters = {"type": "object", "additionalProperties": {"type": "integer"}}
    assert accepts(name, parameters, f"{number}1{text}")
    assert not accepts(name, parameters, f"{number}abc{text}")


def test_an_argument_of_gemma_that_is_required_and_has_no_schema_is_written():
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a", "b"]}
    assert accepts("gemma4", parameters, '<|tool_call>call:f{a:<|"|>x<|"|>,b:1}')
    assert not accepts("gemma4", parameters, '<|tool_call>call:f{a:<|"|>x<|"|>}')


def test_a_grammar_without_schemas_that_is_too_long_is_refused():
    with pytest.raises(InvalidRequest, match=r"more than \d+ characters") as refused:
        Lark({}).either("x" * 2**20)
    assert refused.value.param == "tools"


NODE: Any = {
    "type": "object",
    "properties": {
        **{f"one_{n}": {"$ref": "#/$defs/Node"} for n in range(4)},
        **{f"all_{n}": {"type": "array", "items": {"$ref": "#/$defs/Node"}} for n in range(4)},
    },
}


@pytest.mark.parametrize("name", ["minimax_m3", "gemma4"])
def test_a_definition_that_refers_to_itself_in_many_places_is_written_out_once(name):
    """For every way to it, that would be millions of rules."""
    schema = {"type": "object", "properties": {"root": {"$ref": "#/$defs/Node"}}, "$defs": {"Node": NODE}}
    tool = {"type": "function", "function": {"name": "ask", "parameters": schema}}
    assert asked(OutputConstraint(calls="must"), tool, trait=FORMS[name].trait).allowed()


@pytest.mark.thorough
def test_arguments_without_end_are_refused_before_all_of_them_are_written_out():
    """Each title makes a schema of its own, and all of them have all of the others."""
    members = {f"a{n}": {"$ref": "#/$defs/Node", "title": str(n)} for n in range(500)}
    node: Any = {"type": "object", "properties": members}
    tool = {"type": "function", "function": {"name": "ask", "parameters": {**node, "$defs": {"Node": node}}}}
    with pytest.raises(InvalidRequest, match=r"more than \d+ characters") as refused:
        asked(OutputConstraint(calls="must"), tool, trait=FORMS["minimax_m3"].trait)
    assert refused.value.param == "tools"


PANICS: Any = {"type": "object", "required": ["a", {"bbb": "e\u0301" * 60}]}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (
            PANICS,
            r"\$\.required\[1\]: .* is not of type 'string'",
        ),
        ({"type": "object", "properties": 1}, r"\$\.properties: "),
        ({"properties": {"a": {"type": "e\u0301" * 60}}}, r"\$\.properties\.a\.type: "),
        ({"items": "x"}, r"\$\.items: "),
    ],
)
def test_what_is_no_schema_is_refused_with_its_place(schema: Any, place: str):
    """The first one made llguidance panic (lesson 47)."""
    with pytest.raises(InvalidRequest, match=place) as refused:
        asked(OutputConstraint(answer=JsonAnswer(schema=schema, field="f")))
    assert refused.value.param == "f"
    assert len(refused.value.message) < 400


def test_a_panic_of_the_library_is_reported_without_its_stack(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("start_llm.output.grammar.enforcer.schema_error", lambda _: None)
    with pytest.raises(InvalidRequest, match="panic") as refused:
        asked(OutputConstraint(answer=JsonAnswer(schema=PANICS, field="f")))
    assert "trace" not in refused.value.message


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "minimum": 1, "exclusiveMinimum": True},
        {"$defs": {"a": {"type": "string"}}, "prefixItems": [{"$ref": "#/$defs/a"}], "items": False},
        {"type": "array", "items": [{"type": "string"}], "additionalItems": False},
        {"x-of-a-client": 1, "nullable": True},
    ],
)
def test_a_schema_of_any_dialect_is_one(schema: Any):
    assert schema_error(schema) is None


def test_what_is_nested_too_deep_to_be_looked_at_is_left_to_the_library():
    deep: Any = {"required": 1}
    for _ in range(240):
        deep = {"properties": {"a": deep}}
    assert schema_error(deep) is None
    with pytest.raises(InvalidRequest):
        asked(OutputConstraint(answer=JsonAnswer(schema=deep, field="f")))


@pytest.mark.parametrize(
    "tools",
    [
        [],
        [{"type": "function", "function": {"name": "other"}}],
    ],
)
def test_a_call_that_nobody_can_make_cannot_be_demanded(tools):
    form = OutputConstraint(calls="must", tools=frozenset({"read"}))
    with pytest.raises(InvalidRequest) as refused:
        asked(form, *tools)
    assert refused.value.param == "tool_choice"


def test_a_call_may_be_demanded_whatever_its_name_is():
    """`output/tool_aliases` gives a name to tools that the notation cannot write."""
    tool = {"type": "function", "function": {"name": "has space"}}
    assert asked(OutputConstraint(calls="must", tools=frozenset({"has space"})), tool)


@pytest.mark.parametrize(("name", "argument"), [("lfm2", "a b"), ("qwen_xml", "a<b"), ("gemma4", 'a<|"|>b')])
def test_an_argument_that_is_required_and_has_no_form_is_refused(name, argument):
    def asked_for(required: list[str]) -> Any:
        parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": required}
        tool = {"type": "function", "function": {"name": "read", "parameters": parameters}}
        return asked(OutputConstraint(calls="must"), tool, trait=FORMS[name].trait)

    with pytest.raises(InvalidRequest, match="has no form in this model's calls") as refused:
        asked_for([argument])
    assert refused.value.param == "tools"
    assert name == "gemma4" or asked_for([])


def test_arguments_that_a_schema_leaves_open_can_be_said_in_python():
    parameters = {"type": "object", "additionalProperties": True}
    tool = {"type": "function", "function": {"name": "note", "parameters": parameters}}
    form = OutputConstraint(calls="must", one_call=True)
    heard = [reply("python_calls", form, [tool], seed=seed) for seed in range(6)]
    assert any(json.loads(arguments) for attempt in heard if attempt.ended for _, arguments in attempt.calls)


def test_words_of_a_tools_schema_that_cannot_be_enforced_are_passed_over():
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "a-shoe-size", "not": {}}}}
    assert asked(
        OutputConstraint(calls="must"), {"type": "function", "function": {"name": "a", "parameters": schema}}
    )


def test_a_guide_that_is_left_is_lost_and_after_the_end_nothing_counts():
    tokenizer = trait_tokenizer("strips_old_reasoning")
    text = tokenizer.encode('{"a": 1}', as_document=False)
    answer = JsonAnswer(schema={"type": "object"}, field="f")
    guide = asked(OutputConstraint(answer=answer))
    guide.advance(text)
    guide.advance([min(tokenizer.eos_token_ids)])
    guide.advance(text)
    other = asked(OutputConstraint(answer=answer))
    with pytest.raises(ConstraintViolated):
        other.advance(tokenizer.encode("Hm.", as_document=False))
    with pytest.raises(ConstraintViolated):
        other.advance(text)


def test_every_notation_that_a_family_has_is_written_too():
    names = [name for name in FAMILIES for name in registry.family_by_name(name).formats]
    assert [name for name in names if NOTATIONS[name].text is None] == []
