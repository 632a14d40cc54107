"""A reply that a client sends back is rendered as the model wrote it, whatever the client did to it.

    prompt → the model's text → events → what a client keeps of them → the next prompt

What the model writes is taken from the template: the rendering of the conversation with the reply in it, up
to the reply's end, less the prompt.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from start_llm.core.chat import Message, Thinking
from start_llm.core.prompt import Prompt
from tests.prompt.echoes import CLIENTS, read, understood
from tests.prompt.fakes import call, prepared, reply, text_of
from tests.prompt.replies import (
    ASKED,
    REASONING_FORMS,
    TOOLS,
    NoEndError,
    ends_of,
    next_messages,
    turn,
)
from tests.templates.traits import TRAITS, trait_tokenizer

pytestmark = pytest.mark.product

REASONING = "Think\n  about it."
CODE = '\n  def größe(x):\n\treturn "\'\\n" + x  # 日本 🐟 \u2028 \\u00e9 \r\n\n'
TAGS = "a </parameter> b </arg_value> c </param> d <tool_call> e </tool_call> f ]]> g & h <think> i [ARGS] {"
ENDS = (
    "</parameter>\n</function>\n</tool_call> </arg_value></tool_call> </param></function> "
    ']]></param></function> <|"|>}<tool_call|> </parameter>\n</invoke>\n</minimax:tool_call> '
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"
)
REPLIES: Mapping[str, Message] = {
    "an answer": reply("Nine metres, I think."),
    "an answer with white space": reply("  Nine\n\n\tmetres.  \n"),
    "an answer that quotes markup": reply(
        "Write <tool_call> or `{`, <think> and [TOOL_CALLS]; </parameter>."
    ),
    "a call": reply("", call(path="a.py", text="x = 1")),
    "code": reply("", call(path="größe.py", text=CODE)),
    "tags": reply("", call(path="x", text=TAGS)),
    "the end of a call in a value": reply("", call(path="x", text=ENDS)),
    "empty values": reply("", call(path="", text="\n", deep={}, lines=[])),
    "values of all types": reply(
        "",
        call(
            path="5",
            count=-3,
            ratio=0.5,
            deep={"b": [1, None, {"z": "<x>\n"}], "a": True, "c": []},
            lines=[1, "two", [3.25]],
            flag=False,
            maybe=None,
            extra="7",
        ),
    ),
    "a round number": reply("", call(path="x", ratio=1000.0, lines=[1.0, -0.5])),
    "no arguments": reply("", call(name="now")),
    "two calls": reply("", call(path="one"), call("c2", "now")),
    "text and a call": reply("I ask:", call(path="one")),
    "text and two calls": reply("I ask:", call(path="one"), call("c2", path="two", text="t")),
}
"""No answer begins with newlines: after reasoning they are the template's."""

PADDED = "a newline before a value is the format's"
AMBIGUOUS = "a value ends where its end tag and the end of the call follow"
UNQUOTED = ("opens_reasoning", "stop_opens_next", "minicpm", "minimax", "seed", "separated_names")
"""Traits whose calls have no quotes around a text, and no type."""
LOOKS: Mapping[str, Mapping[str, Any]] = {
    **{trait: {"extra": 7} for trait in UNQUOTED},
    "nested_arguments": {"extra": 7, "deep": {"b": [1, None, {"z": "<x>\n"}], "a": True, "c": ""}},
}
"""Values whose types no schema says, as they look. An array without items has no looks."""
CALLS = [label for label, message in REPLIES.items() if message.tool_calls]
TEXT_AND_CALLS = [label for label in CALLS if REPLIES[label].content]
EXCEPTIONS: Mapping[tuple[str, str], str] = {
    **{
        (trait, "the end of a call in a value"): AMBIGUOUS
        for trait in (*UNQUOTED, "dsml", "gemma4_channel", "text_after_calls")
    },
    **{("seed", label): PADDED for label in ("code", "empty values")},
    **{
        (
            "dates",
            label,
        ): "a reply is one message, and the template has one call in each, and no text beside it"
        for label in ("two calls", *TEXT_AND_CALLS)
    },
    **{
        ("bare_call_list", label): "the text of a reply stands in a turn of its own"
        for label in TEXT_AND_CALLS
    },
}
"""Content that a template or a format cannot hold, and why. The tests below hold that there is no other."""


def next_prompt(trait: str, message: Message, *, on: bool, talk: tuple[Message, ...] = ASKED) -> Prompt:
    request: dict[str, Any] = {"tools": TOOLS, "thinking": Thinking(on=on)}
    return prepared(trait, *talk, message, *next_messages(message), **request)


def misunderstood(trait: str, message: Message, *, on: bool) -> list[str]:
    """The clients whose next prompt is another, token for token, than with the message itself."""
    try:
        before = turn(trait, message, on=on)
    except NoEndError:
        return list(CLIENTS)
    answer = understood(trait, before.prompt, before.reply)
    wanted = {str(client.expected(message)): client.expected(message) for client in CLIENTS.values()}
    prompts = {words: next_prompt(trait, expected, on=on).tokens for words, expected in wanted.items()}
    return [
        name
        for name, client in CLIENTS.items()
        if next_prompt(trait, client.echo(answer), on=on).tokens != prompts[str(client.expected(message))]
    ]


def reply_of(trait: str, label: str) -> Message:
    """The reply, with reasoning where the model thinks."""
    return replace(REPLIES[label], reasoning=REASONING if trait in REASONING_FORMS else None)


EVERY_CASE = [(trait, label) for trait in TRAITS for label in REPLIES]
CASES = [case for case in EVERY_CASE if case not in EXCEPTIONS]


@pytest.mark.parametrize(("trait", "label"), CASES)
@pytest.mark.sample(12)
def test_a_reply_that_comes_back_is_rendered_as_it_was_written(trait, label):
    assert misunderstood(trait, REPLIES[label], on=True) == []
    assert misunderstood(trait, REPLIES[label], on=False) == []
    if trait in REASONING_FORMS:
        assert misunderstood(trait, reply_of(trait, label), on=True) == []


@pytest.mark.parametrize(("trait", "label"), EXCEPTIONS)
def test_an_exception_is_one(trait, label):
    assert misunderstood(trait, reply_of(trait, label), on=True) == list(CLIENTS)


@pytest.mark.parametrize(("trait", "label"), CASES)
def test_what_the_model_says_is_what_the_client_gets(trait, label):
    message = reply_of(trait, label)
    before = turn(trait, message, on=True)
    answer = understood(trait, before.prompt, before.reply)
    assert answer.reasoning == (message.reasoning or "")
    assert answer.content.strip() == message.content.strip()
    assert answer.reason == ("tool_calls" if message.tool_calls else "stop")
    assert [name for name, _ in answer.calls] == [tool_call.name for tool_call in message.tool_calls]
    for (_, arguments), tool_call in zip(answer.calls, message.tool_calls, strict=True):
        # Where nothing says the type of a value, and the format has no quotes, it is what it looks like.
        unknown = LOOKS.get(trait, {}) if "extra" in tool_call.arguments else {}
        assert json.loads(arguments) == {**tool_call.arguments, **unknown}


@pytest.mark.parametrize("trait", [trait for trait in TRAITS if (trait, "a call") in CASES])
def test_white_space_that_the_model_writes_before_a_call_is_nobodys(trait):
    message = reply_of(trait, "a call")
    before = turn(trait, message, on=True)
    form = REASONING_FORMS.get(trait, "").format(REASONING)
    output = f"{form}\n\n{before.reply.removeprefix(form)}"
    answer = understood(trait, before.prompt, output)
    assert answer.content == ""
    for client in CLIENTS.values():
        assert (
            next_prompt(trait, client.echo(answer), on=True).tokens
            == next_prompt(trait, client.expected(message), on=True).tokens
        )


# ------------------------------------------------------------------------------- splicing what was generated

AGENTS_TURNS = (
    "a call",
    "code",
    "text and a call",
    "no arguments",
    "values of all types",
    "a call",
    "text and a call",
    "an answer",
)
EMPTY_REASONING = "the prompt has empty reasoning that the history has not"
CUT_OFF = "the template cuts all reasoning off at its closing mark"


def agents_turns(trait: str) -> list[str]:
    return [label for label in AGENTS_TURNS if (trait, label) not in EXCEPTIONS]


MOVED = "the tools and the system text move to the next question"
DROPPED = "the reasoning of an answer is dropped with the next question"
NOT_NEUTRAL: Mapping[tuple[str, bool, str, str], str] = {
    **{
        (trait, False, after, kind): EMPTY_REASONING
        for trait in ("strips_old_reasoning", "effort_words")
        for after in ("user", "tool")
        for kind in ("call", "answer")
    },
    **{("gemma4_channel", False, "user", kind): EMPTY_REASONING for kind in ("call", "answer")},
    **{
        (trait, False, after, kind): EMPTY_REASONING
        for trait in ("minimax", "open_and_close")
        for after in ("user", "tool")
        for kind in ("call", "answer")
    },
    **{("arguments_as_text", True, after, "call"): CUT_OFF for after in ("user", "tool")},
    **{(trait, True, "tool", "answer"): DROPPED for trait in REASONING_FORMS},
    **{
        ("tools_before_last_user", on, after, "answer"): MOVED
        for on in (True, False)
        for after in ("user", "tool")
    },
}
"""Places where generated text differs from the history: trait, whether it thinks, after what, and what."""


def splice(trait: str, message: Message, talk: tuple[Message, ...], *, on: bool) -> tuple[str, str]:
    """Return the prompt and reply, then the fresh prompt from the closer on; and the fresh prompt."""
    before, fresh = turn(trait, message, on=on, talk=talk), next_prompt(trait, message, on=on, talk=talk)
    end = ends_of(fresh)[len(talk)]
    generated = trait_tokenizer(trait).encode(before.reply, as_document=False)
    bound = [*before.prompt.tokens.ids, *generated, *fresh.tokens.ids[end:]]
    return text_of(trait, bound), text_of(trait, fresh.tokens.ids)


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("trait", [trait for trait in TRAITS if (trait, "a call") in CASES])
@pytest.mark.sample(12)
def test_tokens_that_were_generated_read_as_the_fresh_rendering_does(trait, on):
    """At every reply of a conversation. Reasoning stay while their calls are being answered."""
    talk = ASKED
    for label in agents_turns(trait):
        message = reply_of(trait, label) if on else REPLIES[label]
        kind = "call" if message.tool_calls else "answer"
        bound, fresh = splice(trait, message, talk, on=on)
        assert (bound == fresh) is ((trait, on, talk[-1].role, kind) not in NOT_NEUTRAL)
        talk = (*talk, message, *next_messages(message))


@pytest.mark.parametrize("trait", TRAITS)
def test_an_answer_without_reasoning_reads_as_the_fresh_rendering_does(trait):
    """Of a model that was asked not to think, or that knows no reasoning."""
    bound, fresh = splice(trait, REPLIES["an answer"], ASKED, on=False)
    assert (bound == fresh) is ((trait, False, "user", "answer") not in NOT_NEUTRAL)


# ----------------------------------------------------------------------------------- conversations that grow


@pytest.mark.sample(32)
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("trait", [trait for trait in TRAITS if (trait, "a call") in CASES])
def test_a_whole_conversation_of_echoes_is_rendered_as_the_original(trait, client):
    """Each reply is read, sent back in the client's words, and the next one is made after that."""
    ours, theirs = ASKED, ASKED
    for label in agents_turns(trait) * 2:
        message = reply_of(trait, label)
        before = turn(trait, message, on=True, talk=theirs)
        back = CLIENTS[client].echo(read(trait, before.prompt, before.reply, 5))
        expected = CLIENTS[client].expected(message)
        ours = (*ours, expected, *next_messages(expected))
        theirs = (*theirs, back, *next_messages(back))
    request: dict[str, Any] = {"tools": TOOLS, "thinking": Thinking(on=True)}
    assert prepared(trait, *theirs, **request).tokens == prepared(trait, *ours, **request).tokens
