"""Places up to which a prompt is to be kept, in the words of both vendors."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.types import Message as AnthropicMessage

from start_llm.core.chat import ChatRequest, KeptPlace
from start_llm.core.events import Finished, Usage
from start_llm.core.prompt import KeptPrefix
from start_llm.core.prompt_report import Receipt
from start_llm.protocols.anthropic import messages
from start_llm.protocols.base import Parser
from start_llm.protocols.openai import chat_completions
from start_llm.protocols.receipts import receipt_json
from start_llm.protocols.responses import create
from tests.protocols.helpers import CONTEXT, body

MINUTES, HOUR, HALF_A_DAY, DAY = 300, 3600, 43_200, 86_400
HALF_AN_HOUR = 1800
END = -1
CONTROL: Any = {"type": "ephemeral"}
BREAK: Any = {"mode": "explicit"}
HELLO: Any = {"role": "user", "content": "Hello"}


def kept(parse: Parser, **fields: Any) -> list[tuple[KeptPlace, ...]]:
    """Return the places of each message."""
    request = parse(body(**fields), {}, CONTEXT).request
    assert isinstance(request, ChatRequest)
    return [message.kept for message in request.messages]


def text(words: str, **mark: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **mark}


# ---------------------------------------------------------------------------------------- messages


def kept_messages(*sent: Any, **fields: Any) -> list[tuple[KeptPlace, ...]]:
    return kept(messages.parse, max_tokens=9, messages=list(sent), **fields)


def test_blocks_of_a_system_text_are_counted_with_what_is_between_them():
    system = [
        text("One."),
        text(""),
        text("Two.", cache_control=CONTROL),
        text("Three.", cache_control=CONTROL),
    ]
    first, _ = kept_messages(HELLO, system=system)
    assert first == (KeptPlace(10, MINUTES), KeptPlace(18, MINUTES))


def test_blocks_of_a_question_and_of_a_reply():
    question = {
        "role": "user",
        "content": [text("Look"), text(" there", cache_control={**CONTROL, "ttl": "1h"})],
    }
    reply = {"role": "assistant", "content": [text("Yes.", cache_control=CONTROL)]}
    assert kept_messages(question, reply, HELLO) == [(KeptPlace(10, HOUR),), (KeptPlace(4, MINUTES),), ()]


def test_calls_and_results_are_kept_to_the_end_of_their_messages():
    call = {"type": "tool_use", "id": "c", "name": "read", "input": {}, "cache_control": CONTROL}
    result: Any = {"type": "tool_result", "tool_use_id": "c", "content": [text("x", cache_control=CONTROL)]}
    marked = {**result, "cache_control": {**CONTROL, "ttl": "1h"}}
    talk = [HELLO, {"role": "assistant", "content": [text("I look."), call]}]
    assert kept_messages(*talk, {"role": "user", "content": [result]})[1:] == [(KeptPlace(END, MINUTES),)] * 2
    *_, last = kept_messages(*talk, {"role": "user", "content": [marked, text("And?")]})
    assert last == ()
    assert kept_messages(*talk, {"role": "user", "content": [marked]})[-1] == (KeptPlace(END, HOUR),)


def test_tools_are_kept_with_the_system_text_or_in_front_of_the_first_message():
    tools = [{"name": "read"}, {"name": "write", "cache_control": CONTROL}]
    assert kept_messages(HELLO, tools=tools, system="Be brief.") == [(KeptPlace(END, MINUTES),), ()]
    assert kept_messages(HELLO, tools=tools) == [(KeptPlace(0, MINUTES),)]


def test_a_mark_of_the_request_is_at_its_end():
    assert kept_messages(HELLO, HELLO, cache_control={**CONTROL, "ttl": "1h"}) == [
        (),
        (KeptPlace(END, HOUR),),
    ]


# ---------------------------------------------------------------------------------------- chats and responses


def test_parts_of_a_chat():
    turns = [
        {"role": "system", "content": [text("One.", prompt_cache_breakpoint=BREAK), text("Two.")]},
        {"role": "user", "content": [text("Hi", prompt_cache_breakpoint={**BREAK, "ttl": "12h"})]},
    ]
    assert kept(chat_completions.parse, messages=turns) == [
        (KeptPlace(4, HALF_AN_HOUR),),
        (KeptPlace(2, HALF_A_DAY),),
    ]


def test_parts_of_a_chat_may_have_the_other_vendor_s_marks():
    turns = [{"role": "user", "content": [text("Hi", cache_control=CONTROL)]}]
    tool = {"type": "function", "function": {"name": "read"}, "cache_control": CONTROL}
    assert kept(chat_completions.parse, messages=turns) == [(KeptPlace(2, MINUTES),)]
    assert kept(chat_completions.parse, messages=[HELLO], tools=[tool]) == [(KeptPlace(0, MINUTES),)]


def test_the_time_of_a_request_holds_for_all_marks_that_say_none_and_for_its_end():
    part = {"type": "input_text", "text": "Hi", "prompt_cache_breakpoint": BREAK}
    items = [
        {"role": "user", "content": [part, {**part, "prompt_cache_breakpoint": {**BREAK, "ttl": "30m"}}]}
    ]
    asked: Any = {"prompt_cache_options": {"ttl": "12h"}}
    assert kept(create.parse, input=items, **asked) == [
        (KeptPlace(2, HALF_A_DAY), KeptPlace(4, HALF_AN_HOUR), KeptPlace(END, HALF_A_DAY))
    ]
    assert kept(create.parse, input="Hi", prompt_cache_retention="24h") == [(KeptPlace(END, DAY),)]
    assert kept(create.parse, input="Hi", prompt_cache_retention="in_memory") == [()]
    assert kept(
        create.parse, input="Hi", instructions="Be brief.", prompt_cache_options={"mode": "explicit"}
    ) == [
        (),
        (),
    ]


def test_items_of_one_reply_are_joined_with_their_places():
    part = {"type": "output_text", "text": "Yes.", "prompt_cache_breakpoint": BREAK}
    item: Any = {"type": "message", "role": "assistant", "content": [part], "id": "msg_0_" + "x" * 32}
    *_, reply, _ = kept(create.parse, input=[HELLO, item, item, HELLO])
    assert [place.characters for place in reply] in ([4, 8], [4])


def test_a_response_says_what_was_applied():
    def applied(**fields: Any) -> Any:
        reply = create.parse(body(input="Hi", **fields), {}, CONTEXT).reply
        return reply.whole([], Finished("length", Usage(1, 0, 0)))["prompt_cache_options"]

    assert applied() is None
    assert applied(prompt_cache_options={}) == {"mode": "implicit", "ttl": "30m"}
    asked: Any = {"mode": "explicit", "ttl": "12h", "comparison_response_id": "resp_1"}
    assert applied(prompt_cache_options=asked) == {
        "mode": "implicit",
        "ttl": "12h",
        "comparison_response_id": "resp_1",
    }


@pytest.mark.parametrize("mark", [None, 7, [], {}, {"type": "other"}, {"mode": "implicit"}, {"type": []}])
def test_a_damaged_mark_marks_nothing(mark: Any):
    part = text("Hi", cache_control=mark, prompt_cache_breakpoint=mark)
    message = {"role": "user", "content": [part]}
    assert kept_messages(message, cache_control=mark, tools=[{"name": "read", "cache_control": mark}]) == [()]
    assert kept(chat_completions.parse, messages=[message], prompt_cache_options={"ttl": mark}) == [()]


@pytest.mark.parametrize("ttl", [None, 7, [], "2h"])
def test_an_unknown_time_is_the_usual_one(ttl: Any):
    message = {"role": "user", "content": [text("Hi", cache_control={**CONTROL, "ttl": ttl})]}
    assert kept_messages(message) == [(KeptPlace(2, MINUTES),)]


# ---------------------------------------------------------------------------------------- what is sent

RECEIPT = Receipt(
    from_memory=90,
    from_disk=10,
    read=95,
    unread=5,
    kept=(KeptPrefix(40, 300), KeptPrefix(0, 300), KeptPrefix(150, 3600), KeptPrefix(180, 300)),
)


def test_messages_count_what_was_written_up_to_the_last_place():
    parsed = messages.parse(body(messages=[HELLO], max_tokens=9), {}, CONTEXT)
    end = Finished("length", Usage(prompt=200, cached=100, completion=1), receipt=RECEIPT)
    usage = AnthropicMessage.model_validate(parsed.reply.whole([], end)).usage
    assert (usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens) == (
        20,
        80,
        100,
    )
    assert usage.cache_creation
    assert usage.cache_creation.ephemeral_1h_input_tokens == 50
    assert usage.cache_creation.ephemeral_5m_input_tokens == 30


def test_a_place_behind_what_was_read_counts_what_was_read():
    parsed = messages.parse(body(messages=[HELLO], max_tokens=0), {}, CONTEXT)
    receipt = Receipt(read=95, unread=5, kept=(KeptPrefix(100, 300),))
    end = Finished("length", Usage(prompt=100, cached=0, completion=0), receipt=receipt)
    usage = AnthropicMessage.model_validate(parsed.reply.whole([], end)).usage
    assert (usage.input_tokens, usage.cache_creation_input_tokens) == (5, 95)


def test_a_receipt_names_the_places_and_those_that_are_not_kept():
    assert receipt_json(RECEIPT)["breakpoints"] == [
        {"tokens": 40, "ttl_s": 300},
        {"tokens": None, "ttl_s": 300},
        {"tokens": 150, "ttl_s": 3600},
        {"tokens": 180, "ttl_s": 300},
    ]
    without_cache = Receipt(read=10, is_kept=False, kept=(KeptPrefix(4, 300),))
    assert receipt_json(without_cache)["breakpoints"] == [{"tokens": None, "ttl_s": 300}]
    assert "breakpoints" not in receipt_json(Receipt(read=10))
