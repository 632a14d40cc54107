"""Conversations of several turns: what comes back from a client is what the model reads."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from start_llm.core.chat import ChatRequest
from start_llm.protocols.base import RequestContext
from start_llm.protocols.fields import parse_body
from start_llm.protocols.openai.chat_completions import parse
from tests.http.conftest import FamilyServer
from tests.http.forms import ANSWER, FORMS, OTHER, PATH, READ, REASONING, THINKING, TOOLS, WRITE, tool
from tests.http.reading import QUESTION, ReplyContent, hear, post
from tests.http.scripts import asking, write_model
from tests.serving import Server, serving

pytestmark = pytest.mark.sample(5)  # `tests/output` reads every form

EVERY = list(FORMS)
RESULT = "Fifty-two, says the file."


def tokens_of(server: Server, **fields: Any) -> tuple[int, ...]:
    """Return the tokens that the model of a server reads for a request."""
    server_context = server.app._listener.context
    context = RequestContext(server.app.runtime, b"", server_context.seal)
    request = parse(parse_body(json.dumps(fields).encode()), {}, context).request
    assert isinstance(request, ChatRequest)
    return server.app.runtime.service._requests.prepare(request).prompt.tokens.ids


def read_by(server: Server, **fields: Any) -> str:
    """The same as text."""
    token_bytes = server.app.runtime.token_bytes
    return b"".join(map(token_bytes, tokens_of(server, **fields))).decode()


# --------------------------------------------------------------------------------------------- round trips


def answered(message: Any, results: list[str]) -> list[Any]:
    """The conversation after a reply with calls, as a program makes it that uses the SDK."""
    outputs = [
        {"role": "tool", "tool_call_id": call.id, "content": result}
        for call, result in zip(message.tool_calls, results, strict=True)
    ]
    return [*QUESTION, message, *outputs]


@pytest.mark.sample(20)
@pytest.mark.parametrize("name", EVERY)
def test_a_client_makes_the_call_and_the_model_reads_its_result(name, family: FamilyServer):
    server, thinking = family(name), {"enable_thinking": name in THINKING}
    script, after = ("reasoned_call", "reasoned") if name in THINKING else ("call", "answer")
    with closing(OpenAI(base_url=f"{server.url}/v1", api_key="local", max_retries=0)) as client:

        def ask(messages: list[Any], script: str) -> Any:
            fields: Any = {"tools": TOOLS, "extra_body": {**asking(script), **thinking}}
            return client.chat.completions.create(model="any", messages=messages, **fields)

        (first,) = ask(QUESTION, script).choices
        messages = answered(first.message, [RESULT])
        second = ask(messages, after)
    assert first.finish_reason == "tool_calls"
    assert (second.choices[0].message.content, second.choices[0].finish_reason) == (ANSWER, "stop")
    sent = [QUESTION[0], first.message.model_dump(), messages[-1]]
    text = read_by(server, messages=sent, tools=TOOLS, **thinking)
    assert text.count(RESULT) == 1
    assert text.count(str(PATH[1]["path"])) == 1
    assert text.index(str(PATH[1]["path"])) < text.index(RESULT)
    assert second.usage.prompt_tokens == len(
        tokens_of(server, messages=sent, tools=TOOLS, **asking(after), **thinking)
    )


DROPS_REASONING = "deepseek"
"""Its template shows no reasoning of the past."""


@pytest.mark.parametrize("name", THINKING)
def test_the_reasoning_after_a_call_is_read_again_under_either_name(name, family: FamilyServer):
    server = family(name)
    call = {"id": "a1", "type": "function", "function": {"name": "read", "arguments": json.dumps(PATH[1])}}
    result = {"role": "tool", "tool_call_id": "a1", "content": RESULT}
    texts = [
        read_by(
            server,
            messages=[
                *QUESTION,
                {"role": "assistant", "content": "", field: REASONING, "tool_calls": [call]},
                result,
            ],
            tools=TOOLS,
        )
        for field in ("reasoning_content", "reasoning")
    ]
    assert texts[0] == texts[1]
    assert texts[0].count(REASONING) == (0 if name == DROPS_REASONING else 1)


@pytest.mark.sample(10)
@pytest.mark.parametrize("stop", ["deep", "🌊"])
@pytest.mark.parametrize("name", THINKING)
def test_what_a_stop_string_has_cut_short_is_known_in_the_next_turn(name, stop, family: FamilyServer):
    server = family(name)
    question = [{"role": "user", "content": f"How deep is the sea of {name}? Until {stop}, please."}]
    first = post(server, {"messages": question, "stop": stop, **asking("reasoned")}).json
    (choice,) = first["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (ANSWER.partition(stop)[0], "stop")
    messages = [*question, choice["message"], {"role": "user", "content": "Is it?"}]
    usage = post(server, {"messages": messages, **asking("answer")}).json["usage"]
    # The script's token, which ends the prompt, is not in the next one, and a mark before it may change.
    assert usage["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 2


def test_the_call_is_read_as_the_model_wrote_it(family: FamilyServer):
    """The next prompt begins with the last one and the reply."""
    server = family("hermes")
    fields = {"tools": TOOLS, "messages": QUESTION}
    reply = hear(server, **asking("reasoned_call"), **fields).body
    (choice,) = reply["choices"]
    result = {
        "role": "tool",
        "tool_call_id": choice["message"]["tool_calls"][0]["id"],
        "content": RESULT,
    }
    text = read_by(server, messages=[*QUESTION, choice["message"], result], tools=TOOLS)
    written = FORMS["hermes"].reasoning(REASONING) + FORMS["hermes"].calls(PATH)
    assert text.startswith(read_by(server, **fields) + written)


# ---------------------------------------------------------------------------------------------- late tools

LATE = READ | {"defer_loading": True}
REFERENCE = {"type": "tool_reference", "tool_name": "read"}


def search_turn(call_id: str) -> list[dict[str, Any]]:
    """A turn in which a client's own search found a late tool."""
    function = {"name": "write", "arguments": json.dumps(OTHER[1])}
    call = {"id": call_id, "type": "function", "function": function}
    parts = [{"type": "text", "text": "Found:"}, REFERENCE]
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": parts},
    ]


@pytest.mark.sample(20)
@pytest.mark.parametrize("name", EVERY)
def test_a_late_tool_is_in_no_prompt_before_it_is_found(name, family: FamilyServer):
    server = family(name)
    early = {"messages": QUESTION, "tools": [WRITE]}
    late = {"messages": QUESTION, "tools": [WRITE, LATE]}
    assert tokens_of(server, **late) == tokens_of(server, **early)
    answering = {**asking("answer"), "enable_thinking": False}
    heard = hear(server, **late, **answering)
    assert heard.usage["prompt_tokens"] == len(tokens_of(server, **early, **answering))
    assert heard.reply == ReplyContent(content=ANSWER)


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", EVERY)
def test_a_late_tool_is_shown_where_it_was_found_and_may_then_be_called(name, family: FamilyServer):
    server = family(name)
    conversation = [*QUESTION, *search_turn("a1")]
    fields = {"tools": [WRITE, LATE], "enable_thinking": False}
    text = read_by(server, messages=conversation, **fields)
    assert "To read." in text[text.index("Found:") :]
    assert "defer_loading" not in text
    heard = hear(server, messages=conversation, **fields, **asking("call"))
    assert [call.name for call in heard.reply.calls] == ["read"]
    assert heard.reply.finish == "tool_calls"


@pytest.mark.parametrize("name", EVERY)
def test_one_more_late_tool_leaves_a_longer_prompt_as_it_was(name, family: FamilyServer):
    server, another = family(name), tool("erase", path="string") | {"defer_loading": True}
    fields = {"messages": [*QUESTION, *search_turn("a1")], "enable_thinking": False}
    fewer, more = (tokens_of(server, tools=[WRITE, LATE, *late], **fields) for late in ([], [another]))
    assert fewer == more


# ------------------------------------------------------------------------------------------ system messages

REFUSING = {"tools_before_last_user": "[/INST]", "no_system": "\n"}
LATER = [
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "Hi."},
    {"role": "system", "content": "Be brief from now on."},
    {"role": "user", "content": "How deep is it?"},
]


@pytest.fixture(scope="module", params=REFUSING)
def refusing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its template raises an error for a system message after the first message, or for every one."""
    tmp: Path = tmp_path_factory.mktemp("refusing")
    folder = write_model(tmp, request.param, starts={REFUSING[request.param]: ANSWER})
    with serving(folder) as server:
        yield server


@pytest.mark.thorough
@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_message_is_taken_wherever_it_stands(role, refusing: Server):
    messages = [{**message, "role": role} if message["role"] == "system" else message for message in LATER]
    assert hear(refusing, messages=messages).reply == ReplyContent(content=ANSWER)
    text = read_by(refusing, messages=messages)
    places = [text.index(str(message["content"])) for message in messages]
    assert places == sorted(places)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_message_may_stand_first_and_last(role, refusing: Server):
    instruction = {"role": role, "content": "Answer in numbers."}
    for messages in ([instruction, *LATER], [*LATER, instruction]):
        heard = hear(refusing, messages=messages)
        assert heard.reply == ReplyContent(content=ANSWER)
        assert "Answer in numbers." in read_by(refusing, messages=messages)


@pytest.mark.parametrize("name", EVERY)
def test_a_developer_is_read_as_a_system(name, family: FamilyServer):
    system, other = (
        tokens_of(family(name), messages=[{"role": role, "content": "Be brief."}, *QUESTION], tools=TOOLS)
        for role in ("system", "developer")
    )
    assert system == other


# ----------------------------------------------------------------------------------------------- counting


def test_a_prompt_is_counted_as_it_is_computed_with_the_reasoning_that_are_kept(family: FamilyServer):
    """The client leaves the reasoning out; what is bound has it."""
    server = family("hermes")
    body: dict[str, Any] = {"messages": QUESTION, **asking("reasoned"), "enable_thinking": True}
    first = server.post("/v1/chat/completions", body)["choices"][0]["message"]
    body["messages"] = [
        *QUESTION,
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": "And then?"},
    ]
    server_context = server.app._listener.context
    context = RequestContext(server.app.runtime, b"", server_context.seal)
    request = parse(parse_body(json.dumps(body).encode()), {}, context).request
    before = server.get("/stats")["transcripts"]
    counted = server.app.runtime.service.count(request)
    assert server.get("/stats")["transcripts"] == before
    assert counted == server.post("/v1/chat/completions", body)["usage"]["prompt_tokens"]
    assert server.get("/stats")["transcripts"]["bound"] == before["bound"] + 1
