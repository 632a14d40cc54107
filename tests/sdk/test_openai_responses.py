"""The official openai package speaks the Responses protocol, synchronous and asynchronous."""

import asyncio
import json
from collections.abc import Generator
from contextlib import closing
from operator import attrgetter
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import responses as types

from tests.serving import Server, serving

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
RAW_THOUGHT = {
    "response.reasoning_text.delta": types.ResponseReasoningTextDeltaEvent,
    "response.reasoning_text.done": types.ResponseReasoningTextDoneEvent,
}


class Sync:
    """The SDK as most programs use it."""

    def __init__(self, server: Server) -> None:
        self._client = OpenAI(base_url=f"{server.url}/v1", api_key="local", max_retries=0)

    def call(self, method: str, *arguments: Any, **fields: Any) -> Any:
        return attrgetter(method)(self._client.responses)(*arguments, **fields)

    def stream(self, **fields: Any) -> list[Any]:
        return list(self.call("create", stream=True, **fields))

    def close(self) -> None:
        self._client.close()


class Async:
    """The same calls through asyncio."""

    def __init__(self, server: Server) -> None:
        self._client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="local", max_retries=0)
        self._runner = asyncio.Runner()

    def call(self, method: str, *arguments: Any, **fields: Any) -> Any:
        async def run() -> Any:
            return await attrgetter(method)(self._client.responses)(*arguments, **fields)

        return self._runner.run(run())

    def stream(self, **fields: Any) -> list[Any]:
        async def read() -> list[Any]:
            return [event async for event in await self._client.responses.create(stream=True, **fields)]

        return self._runner.run(read())

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


type Client = Sync | Async


@pytest.fixture(scope="module")
def thinker(chain_model) -> Generator[Server]:
    """Thinks, says something and calls, whatever it is asked."""
    with serving(chain_model({"\n": THINKING})) as server:
        yield server


@pytest.fixture(scope="module", params=[Sync, Async])
def client(request, thinker) -> Generator[Client]:
    with closing(request.param(thinker)) as client:
        yield client


def is_whole(response: Any) -> None:
    """It says what the model says."""
    thought, text, call = response.output
    told = [*(thought.content or ()), *thought.summary]
    assert (thought.type, [part.text for part in told]) == ("reasoning", ["Hm."])
    assert (text.type, response.output_text) == ("message", "Let me look.")
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "depth", {"sea": "Baltic"})
    assert (response.status, response.model) == ("completed", "gpt-5")
    usage = response.usage
    assert (usage.output_tokens, usage.output_tokens_details.reasoning_tokens) == (len(THINKING) + 1, 3)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert 0 <= usage.input_tokens_details.cached_tokens < usage.input_tokens


def test_a_whole_response(client):
    is_whole(client.call("create", **ASKED))


def test_every_event_has_its_type_and_number_and_the_last_one_has_it_all(client):
    events = client.stream(**ASKED, reasoning={"effort": "high", "summary": "auto"})
    assert {event.type for event in events} == EVENTS.keys()
    assert [type(event) for event in events] == [EVENTS[event.type] for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    is_whole(events[-1].response)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output


def test_without_a_wish_for_a_summary_the_thought_comes_as_it_is(client):
    events = client.stream(**ASKED)
    told = [event for event in events if event.type.startswith("response.reasoning")]
    assert [type(event) for event in told] == [RAW_THOUGHT[event.type] for event in told] != []
    assert told[-1].text == "Hm."
    is_whole(events[-1].response)


def test_the_sdks_own_stream_reader_puts_the_response_together(thinker):
    with (
        OpenAI(base_url=f"{thinker.url}/v1", api_key="local") as client,
        client.responses.stream(**ASKED) as stream,
    ):
        kinds = {event.type for event in stream}
        is_whole(stream.get_final_response())
    assert {"response.output_text.delta", "response.function_call_arguments.delta"} <= kinds


def bound(server: Server) -> int:
    return server.get("/stats")["transcripts"]["bound"]


@pytest.mark.parametrize("keeps", ["all", "sealed"])
def test_a_call_and_its_thought_go_round(keeps, client, thinker):
    """The items are sent back as the SDK has them; some clients keep nothing of a thought but its seal."""
    question = {"role": "user", "content": f"How deep, {keeps} and {type(client).__name__}?"}
    first = client.call("create", **{**ASKED, "input": [question]}, include=["reasoning.encrypted_content"])
    thought, text, call = first.output
    if keeps == "sealed":
        thought = {
            "type": "reasoning",
            "id": thought.id,
            "summary": [],
            "encrypted_content": thought.encrypted_content,
        }
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "52 m"}
    asked = {**ASKED, "input": [question, thought, text, call, result]}
    before = bound(thinker)
    second = client.call("create", **asked)
    is_whole(second)
    assert bound(thinker) == before + 1
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens


def test_a_response_is_gone_on_from_told_and_deleted(client):
    first = client.call("create", **ASKED, instructions="Be brief.", store=True)
    result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "52 m"}
    asked = {**ASKED, "input": [result], "previous_response_id": first.id}
    second = client.call("create", **asked)
    is_whole(second)
    assert (second.previous_response_id, second.instructions) == (first.id, "Be brief.")
    assert client.call("retrieve", first.id) == first
    assert client.call("delete", first.id) is None
    for method, arguments, fields in [
        ("retrieve", [first.id], {}),
        ("delete", [first.id], {}),
        ("create", [], asked),
    ]:
        with pytest.raises(openai.NotFoundError) as missing:
            client.call(method, *arguments, **fields)
        assert first.id in missing.value.message
    assert client.call("retrieve", second.id) == second


def test_the_input_is_counted_as_it_is_computed(client):
    fields = {name: ASKED[name] for name in ("model", "input", "tools")}
    counted = client.call("input_tokens.count", **fields)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == client.call("create", **ASKED).usage.input_tokens


def test_a_limit_makes_it_incomplete(client):
    whole, streamed = (
        client.call("create", **ASKED, max_output_tokens=4),
        client.stream(**ASKED, max_output_tokens=4),
    )
    assert isinstance(streamed[-1], types.ResponseIncompleteEvent)
    for response in (whole, streamed[-1].response):
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert response.output_text == "Let me look."


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 5}, "input"),
        ({"input": [{"role": "critic", "content": "x"}]}, "input[0].role"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"background": True}, "background"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_request_is_an_exception_that_names_the_field(fields, param, client):
    for ask in (client.stream, lambda **told: client.call("create", **told)):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(**{**ASKED, **fields})
        error = refused.value
        assert (error.status_code, error.param, error.type) == (400, param, "invalid_request_error")
    is_whole(client.call("create", **ASKED))
