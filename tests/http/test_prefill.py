"""A reply goes on from the beginning that the client has written, and both are one message."""

from typing import Any

import pytest

from tests.http.conftest import FamilyServer
from tests.http.forms import ANSWER, FORMS
from tests.http.reading import QUESTION
from tests.http.test_turns import read_by
from tests.server.client import CHAT, Reply, ask
from tests.serving import Server

pytestmark = pytest.mark.sample(5)

EVERY = list(FORMS)
CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}
BEGUN = "It is said: <|script:answer|>"
"""The last token of a prompt chooses the script of the model."""
ON = {"continue_final_message": True, "add_generation_prompt": False}


def post(server: Server, body: Any, path: str = CHAT) -> Reply:
    return ask(server.port, "POST", path, body)


def begun(text: str = BEGUN) -> list[Any]:
    return [*QUESTION, {"role": "assistant", "content": text}]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.sample(20)
def test_the_prompt_ends_in_what_the_client_has_written(name: str, family: FamilyServer):
    server = family(name)
    assert read_by(server, messages=begun(), **ON).endswith(BEGUN)


@pytest.mark.parametrize("name", EVERY)
def test_a_reply_goes_on_and_the_next_turn_is_bound_to_both(name: str, family: FamilyServer):
    server = family(name)
    first = post(server, {"messages": begun(), "reasoning_effort": "none", **ON}).json
    text = first["choices"][0]["message"]["content"]
    assert text == ANSWER
    after = [*begun(BEGUN + text), {"role": "user", "content": "And then?"}]
    usage = post(server, {"messages": after, "reasoning_effort": "none", "max_tokens": 1}).json["usage"]
    whole = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= whole - 2


def test_a_message_that_ends_with_the_assistant_goes_on(family: FamilyServer):
    server = family("hermes")
    asked = {"messages": begun(), "max_tokens": 99, "thinking": {"type": "enabled", "budget_tokens": 50}}
    first = post(server, asked, "/v1/messages").json
    assert first["content"] == [{"type": "text", "text": ANSWER}]
    counted = post(server, asked, "/v1/messages/count_tokens").json["input_tokens"]
    usage = first["usage"]
    assert counted == sum(usage[f"{name}input_tokens"] for name in ("", "cache_read_", "cache_creation_"))
    blocks = [{"type": "text", "text": BEGUN + ANSWER}]
    after = [*QUESTION, {"role": "assistant", "content": blocks}, {"role": "user", "content": "And then?"}]
    usage = post(server, {"messages": after, "max_tokens": 1}, "/v1/messages").json["usage"]
    assert usage["cache_read_input_tokens"] >= counted + first["usage"]["output_tokens"] - 2


def test_a_last_message_without_the_flag_is_a_turn_of_its_own(family: FamilyServer):
    assert not read_by(family("hermes"), messages=begun()).endswith(BEGUN)


@pytest.mark.parametrize(
    ("messages", "more", "param"),
    [
        (begun(), {"add_generation_prompt": True}, "add_generation_prompt"),
        (begun(""), {}, "continue_final_message"),
        (QUESTION, {}, "continue_final_message"),
        (begun()[1:], {}, "continue_final_message"),
        (
            [*QUESTION, {"role": "assistant", "content": "x", "tool_calls": [CALL]}],
            {},
            "continue_final_message",
        ),
        (begun(), {"response_format": {"type": "json_object"}}, "messages"),
    ],
)
def test_what_cannot_go_on_is_refused_by_name(family: FamilyServer, messages: Any, more: Any, param: str):
    reply = post(family("hermes"), {"messages": messages, "continue_final_message": True, **more})
    assert (reply.status, reply.json["error"]["param"]) == (400, param)


def test_its_tokens_can_be_asked_for(family: FamilyServer):
    server = family("hermes")
    tokens = post(server, {"messages": begun(), **ON}, "/tokenize").json["tokens"]
    text = post(server, {"tokens": tokens}, "/detokenize").json["prompt"]
    assert text.endswith(BEGUN)
    refused = post(server, {"messages": begun(), "add_generation_prompt": False}, "/tokenize")
    assert refused.json["error"]["param"] == "add_generation_prompt"
