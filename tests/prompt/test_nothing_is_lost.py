"""Every word that an agent sends is in the prompt, whatever its template does; reasoning is up to that."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from start_llm.core.chat import Json, Message
from start_llm.prompt.template import TemplateMessage
from start_llm.prompt.template_audit.audit import audit
from start_llm.prompt.template_audit.facts import TemplateFacts
from start_llm.prompt.template_audit.probe import SYSTEM, TOOL
from tests.prompt.fakes import (
    WatchedTokenizer,
    call,
    family_of,
    function,
    preparer_of,
    reply,
    result,
    shown,
    system,
    user,
)
from tests.templates.traits import TRAITS, trait_tokenizer

pytestmark = [pytest.mark.product, pytest.mark.sample(3)]

TEXT: Json = {"type": "string"}
TODOS: Json = {
    "type": "array",
    "description": "All the todos.",
    "items": {
        "type": "object",
        "properties": {
            "subject": {"type": "string", "description": "Shortly told.", "minLength": 1},
            "state": {"type": "string", "enum": ["pending", "running", "completed"]},
            "steps": {
                "type": "array",
                "items": {"type": "object", "properties": {"minutes": {"type": "integer"}}},
            },
        },
        "required": ["subject", "state"],
        "additionalProperties": False,
    },
}
WRITE = function("write", path=TEXT, text={"type": "string", "description": "Replaces everything."})
READ = function("read", path=TEXT, line={"type": "integer", "default": 17, "minimum": 1})
TODO = function("todo", todos=TODOS)
CHOOSE = function(
    "choose",
    mode={"type": "string", "enum": ["fast", "careful"], "description": "Pick."},
    either={
        "anyOf": [{"type": "string", "const": "nowhere"}, {"type": "object", "properties": {"deep": TEXT}}]
    },
    limits={"type": "object", "properties": {"upper": {"type": "number", "description": "At most."}}},
    several={"type": ["string", "null"]},
    names={"type": "array", "items": {"type": "string", "pattern": "lowercase"}},
    labels={"type": "object", "additionalProperties": {"type": "string", "description": "Anything."}},
    anything={},
)
BARE: tuple[Mapping[str, Json], ...] = (
    {"type": "function", "function": {"name": "alone"}},
    {"type": "function", "function": {"name": "described", "description": "Does something."}},
    {
        "type": "function",
        "function": {"name": "undescribed", "parameters": {"type": "object", "properties": {"key": TEXT}}},
    },
    {"type": "function", "function": {"name": "unshaped", "description": "Nothing.", "parameters": {}}},
    {
        "type": "function",
        "function": {"name": "untyped", "description": "Little.", "parameters": {"type": "object"}},
    },
    {"type": "function", "function": {"name": "nulled", "description": None, "parameters": None}},
)
THINKING = {"reasoning": "Pondering."}
OLD = (user("Earlier asked."), reply("Earlier answered."))
CALLED = (user("Asked."), reply("", call(path="first", text="body")), result("Found."))
QUOTES = "Before </think> then <think> and <|channel|>analysis<|message|>, <|channel|>final<|message|> after."
MORE = "Also <channel|> and <|channel>thought here, [THINK] there [/THINK], <tool_call> at last."


@dataclass(frozen=True)
class Kind:
    """One kind of request."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Json], ...] = (WRITE, READ)


KINDS: Mapping[str, Kind] = {
    "a question": Kind((user("Asked."),), ()),
    "a question with a system message": Kind((system("Ruled."), user("Asked.")), ()),
    "several systems": Kind((system("Ruled."), system("Regulated."), *OLD, system("Late."), user("Asked."))),
    "only a system message": Kind((system("Ruled."),)),
    "tools": Kind((system("Ruled."), user("Asked."))),
    "a nested schema": Kind((user("Asked."),), (TODO,)),
    "choices and alternatives": Kind((system("Ruled."), user("Asked.")), (CHOOSE, READ)),
    "tools without descriptions or parameters": Kind((user("Asked."),), BARE),
    "a call that is being answered": Kind(CALLED),
    "a call that is being answered, with a system message": Kind((system("Ruled."), *CALLED)),
    "a call that was answered": Kind((system("Ruled."), *CALLED, reply("Answered."), user("Thanked."))),
    "a call without tools": Kind((*CALLED, user("Summarise.")), ()),
    "a call with an answer before it": Kind((*OLD, *CALLED)),
    "a call with a text": Kind((user("Asked."), reply("Spoken.", call(path="first")), result("Found."))),
    "a call with reasoning": Kind(
        (user("Asked."), reply("", call(path="first"), **THINKING), result("Found."))
    ),
    "a call with white space": Kind(
        (user("Asked."), reply("\n", call(path="first"), **THINKING), result("Found."))
    ),
    "a call with a text and reasoning": Kind(
        (user("Asked."), reply("Spoken.", call(path="first"), **THINKING), result("Found."))
    ),
    "a long loop": Kind(
        (
            system("Ruled."),
            user("Asked."),
            reply("Spoken.", call("a", path="first"), **THINKING),
            result("Found.", "a"),
            reply("Uttered.", call("b", "read", path="second"), **THINKING),
            result("Discovered.", "b"),
        )
    ),
    "two calls": Kind(
        (
            user("Asked."),
            reply("Spoken.", call("a", path="first"), call("b", "read", path="second"), **THINKING),
            result("Found.", "a"),
            result("Discovered.", "b"),
        )
    ),
    "results in another order": Kind(
        (
            user("Asked."),
            reply("", call("a", path="first"), call("b", "read", path="second")),
            result("Discovered.", "b"),
            result("Found.", "a"),
        )
    ),
    "a result is missing": Kind(
        (
            user("Asked."),
            reply("", call("a", path="first"), call("b", "read", path="second")),
            result("Found.", "a"),
        )
    ),
    "a user after a result": Kind((*CALLED, user("Interrupted."))),
    "a user in place of a result": Kind(
        (user("Asked."), reply("Spoken.", call(path="first")), user("Interrupted."))
    ),
    "a result that says nothing": Kind((user("Asked."), reply("", call(path="first")), result(""))),
    "a call without arguments": Kind((user("Asked."), reply("", call("a", "read")), result("Found.", "a"))),
    "nested arguments": Kind(
        (
            user("Asked."),
            reply(
                "", call("a", "todo", todos=[{"subject": "dishes", "state": "pending", "deep": {"er": [1]}}])
            ),
            result("Found.", "a"),
        ),
        (TODO,),
    ),
    "an answer with reasoning": Kind((user("Asked."), reply("Answered.", **THINKING), user("Thanked."))),
    "an answer with reasoning after a call": Kind(
        (*CALLED, reply("Answered.", **THINKING), user("Thanked."))
    ),
    "an empty answer": Kind((user("Asked."), reply(""), user("Again."))),
    "an empty answer with reasoning": Kind((user("Asked."), reply("", **THINKING), user("Again."))),
    "an empty answer at the end": Kind((user("Asked."), reply(""))),
    "an empty question": Kind((user(""), reply("Answered."), user("Again."))),
    "two answers": Kind((user("Asked."), reply("Answered."), reply("Added."), user("Thanked."))),
    "quoted marks": Kind((user("Asked."), reply(QUOTES), user("Thanked."))),
    "more quoted marks": Kind(
        (system("Ruled."), user("Asked."), reply(f"{MORE}\n{QUOTES}"), user("Thanked."))
    ),
    "quoted marks and reasoning": Kind((user("Asked."), reply(QUOTES, **THINKING), user("Thanked."))),
    "quoted marks beside a call": Kind((user("Asked."), reply(QUOTES, call(path="first")), result("Found."))),
    "quoted marks in reasoning": Kind(
        (user("Asked."), reply("", call(path="first"), reasoning=QUOTES), result("Found."))
    ),
    "quoted marks in all else": Kind(
        (system(QUOTES), user(QUOTES), reply("", call(path="first", text=QUOTES)), result(QUOTES))
    ),
    "a quoted mark at the end": Kind((user("Asked."), reply("It is closed by </think>"), user("Thanked."))),
    "reasoning in the text": Kind(
        (user("Asked."), reply("<think>\n\n</think>\n\nAnswered: not </think> but this."), user("Thanked."))
    ),
}
NATIVE = [trait for trait in TRAITS if preparer_of(trait).facts.takes_calls]
THINKERS = [trait for trait in NATIVE if preparer_of(trait).facts.reasoning_key]


def words(value: Json) -> Iterator[str]:
    """Of all that a value says."""
    match value:
        case str():
            yield from re.findall(r"\w+", value)
        case dict():
            for key, inner in value.items():
                yield from (*words(key), *words(inner))
        case list():
            for inner in value:
                yield from words(inner)
        case _:
            return


def words_of_schema(schema: Json) -> Iterator[str]:
    """The words of a tool. The types of arguments have other names in some families."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        if keyword == "properties" and isinstance(value, dict):
            for name, inner in value.items():
                yield name
                yield from words_of_schema(inner)
        elif keyword not in ("type", "required"):
            inner = value if isinstance(value, list) else [value]
            for item in inner:
                yield from words_of_schema(item) if isinstance(item, dict) else words(item)


def words_of(kind: Kind) -> set[str]:
    texts = [text for item in kind.messages for text in words(item.content)]
    calls = [item for message in kind.messages for item in message.tool_calls]
    texts += [text for item in calls for text in (item.name, *words(dict(item.arguments)))]
    functions: list[Any] = [tool["function"] for tool in kind.tools]
    for about in functions:
        texts += [about["name"], *words(about.get("description")), *words_of_schema(about.get("parameters"))]
    return set(texts)


@pytest.mark.parametrize("label", KINDS)
@pytest.mark.parametrize("trait", TRAITS)
def test_every_word_of_a_request_is_in_the_prompt(trait, label):
    kind = KINDS[label]
    prompt = shown(trait, *kind.messages, tools=kind.tools)
    assert {word for word in words_of(kind) if word not in prompt} == set()


@pytest.mark.parametrize("trait", TRAITS)
def test_what_a_reply_quotes_is_in_the_prompt_letter_for_letter(trait):
    for label in ("quoted marks", "quoted marks and reasoning", "quoted marks beside a call"):
        assert QUOTES in shown(trait, *KINDS[label].messages, tools=(WRITE,))
    assert "standin" not in shown(trait, *KINDS["quoted marks"].messages)


# ---------------------------------------------------------------------------- calls in their turns, reasoning

REASONING = "Whereby thoughtfully pondered."
SECOND = "Thereafter differently considered."


def after_an_end(trait: str, prompt: str, left: str) -> tuple[bool, str]:
    """Return whether a message ends between a word and the call after it, and the text after that end."""
    between = prompt.rpartition(left)[2].partition("undertake")[0]
    closers = "|".join(map(re.escape, preparer_of(trait).facts.closers))
    ends = [match.end() for match in re.finditer(closers, between)]
    return bool(ends), between[max(ends, default=0) :]


@pytest.mark.parametrize("trait", NATIVE)
def test_a_call_stays_in_its_turn(trait):
    """After a text that ends its turn it begins another, as it does after a question."""
    talks = (
        (user("Asked."), reply(text, call(name="undertake")), result("Found.")) for text in ("Spoken.", "")
    )
    with_text, plain = (shown(trait, *talk, tools=(WRITE,)) for talk in talks)
    ends, beginning = after_an_end(trait, with_text, "Spoken.")
    assert not ends or beginning == after_an_end(trait, plain, "Asked.")[1]


@pytest.mark.parametrize("ending", [(), (reply("Answered."), user("Thanked."))], ids=["running", "over"])
@pytest.mark.parametrize("trait", THINKERS)
def test_reasoning_that_is_shown_with_a_call_is_shown_with_text_and_a_call(trait, ending):
    def loop(*texts: str) -> str:
        steps = zip(("a", "b"), texts, (REASONING, SECOND), strict=True)
        talk = [
            message
            for name, text, reasoning in steps
            for message in (reply(text, call(name, path=name), reasoning=reasoning), result("Found.", name))
        ]
        return shown(trait, user("Asked."), *talk, *ending, tools=(WRITE,))

    plain = loop("", "")
    for prompt in (loop("Spoken.", "Uttered."), loop("Spoken.", ""), loop("", "Uttered.")):
        assert [thought in prompt for thought in (REASONING, SECOND)] == [
            thought in plain for thought in (REASONING, SECOND)
        ]
    assert ending or SECOND in plain


# -------------------------------------------------------------------------------------------------- the audit


class Adding(WatchedTokenizer):
    """Adds tools and a system message where there are none."""

    def __init__(self, trait: str, *, tools: bool, system: bool) -> None:
        super().__init__(trait_tokenizer(trait))
        self._tools, self._system = tools, system

    def render(
        self, messages: list[TemplateMessage], tools: list[dict[str, Json]] | None, *rest: Any, **more: Any
    ) -> str:
        if self._tools and not tools:
            tools = [dict(TOOL)]
        if self._system and messages[0]["role"] != "system":
            messages = [SYSTEM, *messages]
        return super().render(messages, tools, *rest, **more)


def facts_beside(trait: str) -> TemplateFacts:
    """The facts of a template as they are where there are always tools, or a system message."""
    facts = preparer_of(trait).facts
    return replace(facts, switch=None) if trait == "option_without_tools" else facts


WITH_A_SYSTEM = [trait for trait in TRAITS if preparer_of(trait).facts.takes_system]


@pytest.mark.parametrize("trait", TRAITS)
@pytest.mark.sample(9)
def test_no_fact_is_another_one_with_tools(trait):
    """But that calls are shown without."""
    facts = audit(Adding(trait, tools=True, system=False), family_of(trait))
    shown_without = preparer_of(trait).facts.takes_calls_without_tools
    assert replace(facts, takes_calls_without_tools=shown_without) == facts_beside(trait)


@pytest.mark.parametrize("trait", WITH_A_SYSTEM)
@pytest.mark.sample(6)
def test_no_fact_is_another_one_with_a_system_message(trait):
    assert audit(Adding(trait, tools=False, system=True), family_of(trait)) == facts_beside(trait)
