"""The official openai package speaks the Responses protocol, synchronous and asynchronous."""

import json
from collections.abc import Generator
from contextlib import closing
from typing import Any

import openai
import pytest
from openai.types import responses as types

from tests.sdk.endpoints import WAY_NAMES, WAYS, Client, openai_client
from tests.serving import Server, serving

pytestmark = [pytest.mark.product, pytest.mark.sample(2)]

THINKING = ["<think>", "Hm.", "</think>", "Let me look.", "<tool_call>", '{"name": "depth", "arguments": ',
            '{"sea": "Baltic"}}', "</tool_call>"]  # fmt: skip
DEPTH: Any = {
    "type": "function", "name": "depth", "description": "of a sea", "strict": True,
    "parameters": {"type": "object", "properties": {"sea": {"type": "string"}}},
}  # fmt: skip
ASKED: dict[str, Any] = {"model": "gpt-5", "input": "How deep is it?", "tools": [DEPTH]}
EVENTS = {
    "response.created": types.ResponseCreatedEvent,
    "response.in_progress": types.ResponseInProgressEvent,
    "response.output_item.added": types.ResponseOutputItemAddedEvent,
    "response.reasoning_summary_part.added": types.ResponseReasoningSummaryPartAddedEvent,
    "response.reasoning_summary_text.delta": types.ResponseReasoningSummaryTextDeltaEvent,
    "response.reasoning_summary_text.done": types.ResponseReasoningSummaryTextDoneEvent,
    "response.reasoning_summary_part.done": types.ResponseReasoningSummaryPartDoneEvent,
    "response.content_part.added": types.ResponseContentPartAddedEvent,
    "response.output_text.delta": types.ResponseTextDeltaEvent,
    "response.output_text.done": types.ResponseTextDoneEvent,
    "response.content_part.done": types.ResponseContentPartDoneEvent,
    "response.function_call_arguments.delta": types.ResponseFunctionCallArgumentsDeltaEvent,
    "response.function_call_arguments.done": types.ResponseFunctionCallArgumentsDoneEvent,
    "response.output_item.done": types.ResponseOutputItemDoneEvent,
    "response.completed": types.ResponseCompletedEvent,
}
RAW_REASONING = {
    "response.reasoning_text.delta": types.ResponseReasoningTextDeltaEvent,
    "response.reasoning_text.done": types.ResponseReasoningTextDoneEvent,
}


@pytest.fixture(scope="module")
def thinker(chain_model) -> Generator[Server]:
    """Thinks, says something and calls, whatever it is asked."""
    with serving(chain_model({"\n": THINKING})) as server:
        yield server


@pytest.fixture(scope="module", params=WAYS, ids=WAY_NAMES)
def client(request, thinker, endpoints) -> Generator[Client]:
    with closing(openai_client(request.param, thinker, endpoints)) as client:
        yield client


@pytest.fixture(scope="module")
def endless(tiny_model) -> Generator[Server]:
    """Never ends."""
    with serving(tiny_model("qwen3")) as server:
        yield server


@pytest.fixture(scope="module", params=WAYS, ids=WAY_NAMES)
def endless_client(request, endless, endpoints) -> Generator[Client]:
    with closing(openai_client(request.param, endless, endpoints)) as client:
        yield client


def is_whole(response: Any) -> None:
    """It says what the model says."""
    reasoning, text, call = response.output
    parts = [*(reasoning.content or ()), *reasoning.summary]
    assert (reasoning.type, [part.text for part in parts]) == ("reasoning", ["Hm."])
    assert (text.type, response.output_text) == ("message", "Let me look.")
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "depth", {"sea": "Baltic"})
    assert (response.status, response.model) == ("completed", "gpt-5")
    usage = response.usage
    assert (usage.output_tokens, usage.output_tokens_details.reasoning_tokens) == (len(THINKING) + 1, 3)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert 0 <= usage.input_tokens_details.cached_tokens < usage.input_tokens


@pytest.mark.sample(4)
def test_a_whole_response(client):
    is_whole(client.call("responses.create", **ASKED))


def test_every_event_has_its_type_and_number_and_the_last_one_has_it_all(client):
    events = client.read("responses.create", **ASKED, reasoning={"effort": "high", "summary": "auto"})
    assert {event.type for event in events} == EVENTS.keys()
    assert [type(event) for event in events] == [EVENTS[event.type] for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    is_whole(events[-1].response)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output


def test_without_a_wish_for_a_summary_the_reasoning_comes_as_it_is(client):
    events = client.read("responses.create", **ASKED)
    raw_events = [event for event in events if event.type.startswith("response.reasoning")]
    assert [type(event) for event in raw_events] == [RAW_REASONING[event.type] for event in raw_events] != []
    assert raw_events[-1].text == "Hm."
    is_whole(events[-1].response)


@pytest.mark.thorough
def test_the_sdks_own_stream_reader_puts_the_response_together(client):
    events, response = client.read_with("responses.stream", "get_final_response", **ASKED)
    kinds = {event.type for event in events}
    is_whole(response)
    assert {"response.output_text.delta", "response.function_call_arguments.delta"} <= kinds


def test_a_custom_call_has_its_own_events_and_goes_round(client, thinker):
    """The model's text is not of the tool's form, so the text is all that it wrote."""
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
    tools = [{"type": "custom", "name": "depth", "description": "of a sea", "format": form}]
    question = {"role": "user", "content": f"Custom, {client.endpoint.url}, {type(client).__name__}?"}
    events = client.read("responses.create", **{**ASKED, "input": [question], "tools": tools})
    parts = [event for event in events if event.type.startswith("response.custom_tool_call_input")]
    assert [type(event) for event in parts] == [
        types.ResponseCustomToolCallInputDeltaEvent,
        types.ResponseCustomToolCallInputDoneEvent,
    ]
    *_, call = events[-1].response.output
    assert isinstance(call, types.ResponseCustomToolCall)
    assert (call.name, json.loads(call.input), parts[0].delta) == ("depth", {"sea": "Baltic"}, parts[1].input)
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "9 m"}
    again = {**ASKED, "input": [question, *events[-1].response.output, result], "tools": tools}
    assert client.call("responses.create", **again).status == "completed"


def bound(server: Server) -> int:
    return server.get("/stats")["transcripts"]["bound"]


@pytest.mark.sample(4)
@pytest.mark.parametrize("keeps", ["all", "sealed"])
def test_a_call_and_its_reasoning_go_round(keeps, client, thinker):
    """The items are sent back as the SDK has them; some clients keep nothing of reasoning but its seal."""
    question = {
        "role": "user",
        "content": f"How deep, {keeps} and {client.endpoint.url} and {type(client).__name__}?",
    }
    first = client.call(
        "responses.create", **{**ASKED, "input": [question]}, include=["reasoning.encrypted_content"]
    )
    reasoning, text, call = first.output
    if keeps == "sealed":
        reasoning = {
            "type": "reasoning",
            "id": reasoning.id,
            "summary": [],
            "encrypted_content": reasoning.encrypted_content,
        }
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "52 m"}
    asked = {**ASKED, "input": [question, reasoning, text, call, result]}
    before = bound(thinker)
    second = client.call("responses.create", **asked)
    is_whole(second)
    assert bound(thinker) == before + 1
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens


@pytest.mark.thorough
def test_a_response_is_continued_returned_and_deleted(client):
    first = client.call("responses.create", **ASKED, instructions="Be brief.", store=True)
    result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "52 m"}
    asked = {**ASKED, "input": [result], "previous_response_id": first.id}
    second = client.call("responses.create", **asked)
    is_whole(second)
    assert second.instructions == "Be brief."
    assert second.previous_response_id == first.id
    stored = client.call("responses.retrieve", first.id)
    assert (stored.id, stored.output_text) == (first.id, first.output_text)
    assert stored.usage.total_tokens == first.usage.total_tokens
    assert client.call("responses.delete", first.id) is None
    for method, arguments, fields in [
        ("responses.retrieve", [first.id], {}),
        ("responses.delete", [first.id], {}),
        ("responses.input_items.list", [first.id], {}),
        ("responses.create", [], asked),
    ]:
        with pytest.raises(openai.NotFoundError, match="There is no response"):
            client.call(method, *arguments, **fields)
    assert client.call("responses.retrieve", second.id).id == second.id


def test_the_input_is_counted_as_it_is_computed(client):
    fields = {name: ASKED[name] for name in ("model", "input", "tools")}
    counted = client.call("responses.input_tokens.count", **fields)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == client.call("responses.create", **ASKED).usage.input_tokens


def test_a_limit_makes_it_incomplete(client):
    whole, streamed = (
        client.call("responses.create", **ASKED, max_output_tokens=4),
        client.read("responses.create", **ASKED, max_output_tokens=4),
    )
    assert isinstance(streamed[-1], types.ResponseIncompleteEvent)
    for response in (whole, streamed[-1].response):
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert response.output_text == "Let me look."


@pytest.mark.thorough
def test_a_limit_makes_a_long_reply_incomplete(endless_client):
    asked = {"model": "gpt-5", "input": "Go on.", "max_output_tokens": 17, "reasoning": {"effort": "none"}}
    whole = endless_client.call("responses.create", **asked)
    last = endless_client.read("responses.create", **asked)[-1]
    assert isinstance(last, types.ResponseIncompleteEvent)
    incomplete: Any = last.response
    for response in (whole, incomplete):
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert response.usage.output_tokens == 17


@pytest.mark.thorough
def test_what_a_response_answered_is_listed_in_pages(client):
    messages = [{"role": "user", "content": f"Number {number}"} for number in range(5)]
    question = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Now?"}]}]
    first = client.call("responses.create", **{**ASKED, "input": messages})
    second = client.call("responses.create", **{**ASKED, "input": question}, previous_response_id=first.id)
    every = client.pages("responses.input_items.list", second.id, limit=2, order="asc")
    texts = [part.text for item in every if item.type == "message" for part in item.content]
    assert texts == [*(message["content"] for message in messages), "Let me look.", "Now?"]
    assert len({item.id for item in every}) == len(every) == 9
    newest = client.call("responses.input_items.list", second.id, limit=3)
    assert [item.id for item in newest.data] == [item.id for item in every[:-4:-1]]
    assert newest.has_more
    after = client.pages("responses.input_items.list", second.id, after=every[1].id)
    assert [item.id for item in after] == [every[0].id]


@pytest.mark.sample(4)
def test_log_probabilities_are_reported_to_those_who_include_them(client):
    asked = {**ASKED, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole, last = client.call("responses.create", **asked), client.read("responses.create", **asked)[-1]
    for response in (whole, last.response):
        (part,) = response.output[1].content
        assert part.text == "Let me look."
        assert "".join(entry.token for entry in part.logprobs).endswith(part.text)
        assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in part.logprobs)
    assert not client.call("responses.create", **ASKED).output[1].content[0].logprobs


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"role": "critic", "content": "x"}]}, "input[0].role"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"top_logprobs": 99}, "top_logprobs"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"background": True}, "background"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_request_is_an_exception_that_names_the_field(fields, param, client):
    for ask in (client.read, client.call):
        with pytest.raises(openai.BadRequestError) as refused:
            ask("responses.create", **{**ASKED, **fields})
        error = refused.value
        assert (error.status_code, error.param, error.type) == (400, param, "invalid_request_error")
    is_whole(client.call("responses.create", **ASKED))


def test_an_input_of_another_type_is_refused(client):
    with pytest.raises(openai.BadRequestError, match="input"):
        client.call("responses.create", **{**ASKED, "input": 5})
