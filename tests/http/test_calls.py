"""Calls come as calls, in the form of every family, and nothing else does."""

import json
import re

import pytest

from start_llm.formats.registry import NOTATIONS
from tests.http.conftest import FamilyServer, Hearing
from tests.http.forms import (
    ANSWER,
    FORMS,
    LONG,
    OTHER,
    PATH,
    PROSE,
    REASONING,
    THINKING,
    TOOLS,
    Call,
    answers,
    reasoning_of_a_call,
    reasoning_texts,
)
from tests.http.reading import QUESTION, REPORT, Heard, ReplyContent, content_of, post
from tests.http.scripts import asking
from tests.templates.traits import TRAITS

pytestmark = pytest.mark.sample(5)  # `tests/output` reads every form

EVERY = list(FORMS)
STREAMING = [name for name, form in FORMS.items() if form.streams]
WHOLE = [name for name, form in FORMS.items() if not form.streams]
SEVERAL = [name for name, form in FORMS.items() if form.between is not None]
SCRIPTS = [
    (name, script) for name, form in FORMS.items() for script in {**reasoning_texts(form), **answers(form)}
]


def calls(heard: Heard) -> list[Call]:
    return [(call.name, json.loads(call.arguments)) for call in heard.reply.calls]


def written(name: str, script: str) -> str:
    """The text of a script, as it is without the token that ends it."""
    return answers(FORMS[name])[script].removesuffix(FORMS[name].end)


@pytest.mark.sample(16)
@pytest.mark.parametrize(("name", "script"), SCRIPTS)
@pytest.mark.product
def test_a_stream_says_what_a_whole_reply_says(name, script, hearing: Hearing):
    reply = hearing(name, script).reply
    assert reply.content or reply.calls


# --------------------------------------------------------------------------------------------- real calls


@pytest.mark.thorough
@pytest.mark.parametrize("name", EVERY)
def test_a_call_is_a_call_and_nothing_beside_it(name, hearing: Hearing):
    heard = hearing(name, "call")
    assert calls(heard) == [PATH]
    assert heard.reply.finish == "tool_calls"
    assert heard.kinds == ["tool_calls"]
    (call,) = heard.reply.calls
    (sent,) = heard.body["choices"][0]["message"]["tool_calls"]
    function = {"name": "read", "arguments": call.arguments}
    assert sent == {"id": sent["id"], "type": "function", "function": function}
    assert heard.body["choices"][0]["message"]["content"] == ""


@pytest.mark.thorough
@pytest.mark.parametrize("name", SEVERAL)
def test_two_calls_of_one_reply_are_kept_apart(name, hearing: Hearing):
    heard = hearing(name, "pair")
    assert calls(heard) == [PATH, OTHER]
    assert (heard.kinds, heard.reply.finish) == (["tool_calls"], "tool_calls")


@pytest.mark.thorough
@pytest.mark.parametrize("name", EVERY)
def test_text_before_a_call_comes_first(name, hearing: Hearing):
    heard = hearing(name, "prose")
    assert (heard.reply.content, calls(heard), heard.reply.finish) == (PROSE, [PATH], "tool_calls")
    assert heard.kinds == ["content", "tool_calls"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", THINKING)
def test_reasoning_may_lead_to_a_call_with_no_text_between(name, hearing: Hearing):
    heard = hearing(name, "reasoned_call")
    assert (heard.reply.reasoning, heard.reply.content, calls(heard)) == (REASONING, "", [PATH])
    assert heard.kinds == ["reasoning_content", "tool_calls"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", STREAMING)
def test_a_text_argument_is_streamed_while_it_is_written(name, hearing: Hearing):
    heard = hearing(name, "long")
    assert calls(heard) == [LONG]
    assert len(heard.argument_fragments()) > 10


@pytest.mark.thorough
@pytest.mark.parametrize("name", WHOLE)
def test_an_object_is_sent_once_it_is_known_to_be_whole(name, hearing: Hearing):
    assert len(hearing(name, "call").argument_fragments()) == 1


@pytest.mark.long
def test_ids_of_calls_are_never_used_twice(hearing: Hearing):
    heard = [hearing(name, script) for name in SEVERAL for script in ("call", "pair")]
    streamed = [call.id for item in heard for call in item.reply.calls]
    whole = [call["id"] for item in heard for call in item.body["choices"][0]["message"]["tool_calls"]]
    assert len({*streamed, *whole}) == len(streamed) + len(whole) == 2 * 3 * len(SEVERAL)
    assert all(re.fullmatch(r"call[A-Za-z0-9]+", item) for item in (*streamed, *whole))


# --------------------------------------------------------------------------------------- what is no call


@pytest.mark.thorough
@pytest.mark.parametrize("name", THINKING)
def test_a_call_in_reasoning_is_reasoning(name, hearing: Hearing):
    reasoning = reasoning_of_a_call(FORMS[name])
    assert hearing(name, "call_in_reasoning").reply == ReplyContent(content=ANSWER, reasoning=reasoning)


@pytest.mark.thorough
@pytest.mark.parametrize("name", EVERY)
def test_a_call_that_cannot_be_made_is_text(name, hearing: Hearing):
    reply = hearing(name, "malformed").reply
    assert reply == ReplyContent(content=body(written(name, "malformed")))


def body(text: str) -> str:
    """The text without Harmony's control tokens, which no answer shows."""
    return text.rpartition("<|message|>")[2].removesuffix("<|call|>")


def is_marked(text: str) -> bool:
    openers = [opener for notation in NOTATIONS.values() for opener in notation.openers]
    return text.lstrip().startswith((*openers, "<|start|>", "<|channel|>", "to="))


@pytest.mark.thorough
@pytest.mark.parametrize("name", EVERY)
def test_a_call_of_no_tool_goes_to_the_client_where_marks_tell_it(name, hearing: Hearing):
    reply, text = hearing(name, "unknown").reply, written(name, "unknown")
    assert [call.name for call in reply.calls] == (["erase"] if is_marked(text) else [])
    assert reply.content == ("" if is_marked(text) else text)


@pytest.mark.thorough
@pytest.mark.parametrize("name", EVERY)
def test_without_tools_nothing_is_a_call(name, hearing: Hearing):
    assert hearing(name, "call", tools=None).reply == ReplyContent(content=body(written(name, "call")))


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", EVERY)
def test_what_may_not_be_called_is_not_and_its_marks_are_avoided(name, family: FamilyServer):
    asked = {"messages": QUESTION, "tools": TOOLS, "enable_thinking": False, **asking("call")}
    reply = content_of(post(family(name), {**asked, "tool_choice": "none", "max_tokens": 40}).json)
    assert reply.calls == ()
    known = TRAITS[FORMS[name].trait].added_tokens
    marks = tuple(text for notation in NOTATIONS.values() for text in notation.openers if text in known)
    assert reply.content == written(name, "call") or not reply.content.startswith(marks)


@pytest.mark.sample(20)
@pytest.mark.parametrize("name", EVERY)
def test_a_tool_that_is_not_among_those_offered_is_the_clients_to_refuse(name, hearing: Hearing):
    (_, write) = TOOLS
    reply, text = hearing(name, "call", tools=[write]).reply, written(name, "call")
    assert [call.name for call in reply.calls] == (["read"] if is_marked(text) else [])
    assert reply.content == ("" if is_marked(text) else text)


# ------------------------------------------------------------------------------------------------ endings


def cut_after(hearing: Hearing, name: str, script: str, pattern: str) -> Heard:
    """The reply to a limit that ends it after a pattern."""
    limit = hearing(name, script, **REPORT).tokens_until(pattern)
    return hearing(name, script, max_tokens=limit)


@pytest.mark.thorough
@pytest.mark.parametrize("name", STREAMING)
def test_a_limit_in_a_call_leaves_it_open(name, hearing: Hearing):
    heard = cut_after(hearing, name, "call", "all o")
    assert (heard.reply.finish, heard.reply.content) == ("length", "")
    (call,) = heard.reply.calls
    opening = '{"path": "'
    assert call.name == "read"
    assert call.arguments.startswith(opening)
    begun = json.loads(f'"{call.arguments.removeprefix(opening)}"')
    assert begun.startswith("all o")
    assert str(PATH[1]["path"]).startswith(begun)


@pytest.mark.thorough
@pytest.mark.parametrize("name", WHOLE)
def test_a_limit_in_an_object_leaves_the_text_that_was_to_become_a_call(name, hearing: Hearing):
    heard = cut_after(hearing, name, "call", "all o")
    assert (heard.reply.finish, heard.reply.calls) == ("length", ())
    assert "all o" in heard.reply.content
    assert body(written(name, "call")).startswith(heard.reply.content)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    SEVERAL,
)
def test_a_limit_in_the_second_of_two_calls_is_reported(name, hearing: Hearing):
    heard = cut_after(hearing, name, "pair", r'a \\?"b')
    first, *_ = heard.reply.calls
    assert (first.name, json.loads(first.arguments)) == PATH
    assert heard.reply.finish == "length"


@pytest.mark.thorough
@pytest.mark.parametrize("name", EVERY)
def test_a_stop_string_in_a_call_is_none(name, hearing: Hearing):
    heard = hearing(name, "call", stop=["resund 🐡", "\n", "<", "{", "read"])
    assert heard.reply == hearing(name, "call").reply


@pytest.mark.thorough
@pytest.mark.parametrize("name", EVERY)
def test_a_stop_string_before_a_call_prevents_it(name, hearing: Hearing):
    heard = hearing(name, "prose", stop=["see. 🔎"])
    assert heard.reply == ReplyContent(content="Let me ")
