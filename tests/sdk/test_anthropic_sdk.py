"""The official anthropic package is the client, synchronous and asynchronous."""

import asyncio
import time
from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic

from tests.sdk.endpoints import KEY, PROXIED, WAY_NAMES, WAYS, Client, anthropic_client
from tests.serving import Server, serving

pytestmark = [pytest.mark.product, pytest.mark.sample(2)]

HELLO = ["Hello", ", how", " are", " you", " to", "day?", "\nFine.", b" \xf0\x9f", b"\x90\x9f"]
TEXT = "Hello, how are you today?\nFine. 🐟"
CALLING = ["<think>", "Hm.", "</think>", "Let me look.", "<tool_call>", '{"name": "depth", "arguments": ',
           '{"sea": "Baltic"}}', "</tool_call>"]  # fmt: skip
ANSWER = ["459", " metres."]
QUESTION = [{"role": "user", "content": "Say hello."}]
DEPTH = {
    "name": "depth",
    "description": "How deep a sea is.",
    "input_schema": {"type": "object", "properties": {"sea": {"type": "string"}}, "required": ["sea"]},
}
ENDLESS = 100_000
"""Tokens; the random model never ends by itself."""


def create(client: Client, **fields: Any) -> Any:
    return client.call("messages.create", **filled(fields))


def stream(client: Client, **fields: Any) -> list[Any]:
    return client.read("messages.create", **filled(fields))


def read(client: Client, **fields: Any) -> tuple[list[Any], Any]:
    return client.read_with("messages.stream", "get_final_message", **filled(fields))


def options(server: Server) -> dict[str, Any]:
    return {"base_url": server.url, "api_key": KEY, "max_retries": 0}


def filled(fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": "claude-any", "max_tokens": 100, "messages": QUESTION, **fields}


@pytest.fixture(scope="module")
def scripted(chain_model) -> Generator[Server]:
    """Says TEXT, whatever it is asked."""
    with serving(chain_model({"\n": HELLO})) as server:
        yield server


@pytest.fixture(scope="module")
def calling(chain_model) -> Generator[Server]:
    """Thinks and calls a tool; without thinking it has an answer."""
    with serving(chain_model({"\n": CALLING, "\n\n": ANSWER})) as server:
        yield server


@pytest.fixture(scope="module")
def random(tiny_model) -> Generator[Server]:
    """Never ends."""
    with serving(tiny_model("qwen3"), max_kv_size=4096, max_body_bytes=100_000) as server:
        yield server


@pytest.fixture(scope="module", params=WAYS, ids=WAY_NAMES)
def client(request, scripted, endpoints) -> Generator[Client]:
    with closing(anthropic_client(request.param, scripted, endpoints)) as client:
        yield client


@pytest.fixture(scope="module", params=WAYS, ids=WAY_NAMES)
def caller(request, calling, endpoints) -> Generator[Client]:
    with closing(anthropic_client(request.param, calling, endpoints)) as client:
        yield client


@pytest.fixture(scope="module", params=WAYS, ids=WAY_NAMES)
def random_client(request, random, endpoints) -> Generator[Client]:
    with closing(anthropic_client(request.param, random, endpoints)) as client:
        yield client


def text_of(message: Any) -> str:
    (block,) = message.content
    assert block.type == "text"
    return block.text


def prompt_tokens(usage: Any) -> int:
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# ---------------------------------------------------------------------------------------------------- replies


@pytest.mark.thorough
def test_a_whole_reply(client: Client):
    message = create(client)
    assert text_of(message) == TEXT
    assert (message.type, message.role, message.model) == ("message", "assistant", "claude-any")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens == len(HELLO) + 1


def test_a_stream_event_by_event(client: Client):
    start, begun, *deltas, stopped, delta, stop = stream(client)
    assert (start.type, begun.type, stopped.type, delta.type, stop.type) == (
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    )
    kinds = {(event.type, event.delta.type, event.index) for event in deltas}
    assert kinds == {("content_block_delta", "text_delta", 0)}
    assert "".join(event.delta.text for event in deltas) == TEXT
    assert (delta.delta.stop_reason, delta.usage.output_tokens) == ("end_turn", len(HELLO) + 1)
    assert start.message.usage.input_tokens == prompt_tokens(delta.usage)


@pytest.mark.sample(4)
def test_the_sdks_own_stream_reader_puts_the_reply_together(client: Client):
    events, message = read(client)
    assert text_of(message) == TEXT == "".join(event.text for event in events if event.type == "text")
    assert message.stop_reason == "end_turn"
    assert prompt_tokens(message.usage) == prompt_tokens(create(client).usage)


@pytest.mark.sample(4)
def test_reasoning_and_a_call_arrive_whole_and_streamed(caller: Client):
    events, streamed = read(caller, tools=[DEPTH])
    for message in (create(caller, tools=[DEPTH]), streamed):
        reasoning, text, call = message.content
        assert (reasoning.type, reasoning.thinking) == ("thinking", "Hm.")
        assert reasoning.signature
        assert (text.type, text.text) == ("text", "Let me look.")
        assert (call.type, call.name, call.input) == ("tool_use", "depth", {"sea": "Baltic"})
        assert call.id.startswith("toolu_")
        assert message.stop_reason == "tool_use"
        assert message.usage.output_tokens == len(CALLING) + 1
        assert message.usage.output_tokens_details.thinking_tokens == 3
    assert {"thinking", "signature", "text", "input_json", "content_block_stop"} <= {
        event.type for event in events
    }


@pytest.mark.sample(4)
def test_a_tool_round_trip_with_the_reasoning_goes_on_from_what_was_computed(caller: Client):
    first = create(caller, tools=[DEPTH], system="You know seas.")
    (call,) = (block for block in first.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "459 m"}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    fields = {"tools": [DEPTH], "system": "You know seas.", "messages": messages}
    second = create(caller, **fields, thinking={"type": "disabled"})
    assert text_of(second) == "".join(ANSWER)
    # The token that ends a reply is written anew with what follows it.
    computed = prompt_tokens(first.usage) + first.usage.output_tokens - 1
    assert second.usage.cache_read_input_tokens >= computed


@pytest.mark.sample(4)
def test_limits_and_stop_sequences_are_reported(client: Client):
    message = create(client, max_tokens=3)
    assert (text_of(message), message.stop_reason) == ("Hello, how are", "max_tokens")
    message = create(client, stop_sequences=["today", "never"])
    assert (text_of(message), message.stop_reason) == ("Hello, how are you ", "stop_sequence")
    assert message.stop_sequence == "today"
    assert read(client, stop_sequences=["today"])[1].stop_sequence == "today"


def test_a_demanded_search_is_unavailable_in_the_sdks_own_types(client: Client):
    search = {"type": "web_search_20250305", "name": "web_search"}
    asked = {"tools": [search], "tool_choice": {"type": "tool", "name": "web_search"}}
    for message in (create(client, **asked), read(client, **asked)[1]):
        used, result, text = message.content
        assert isinstance(used, anthropic.types.ServerToolUseBlock)
        assert used.input == {"query": QUESTION[0]["content"]}
        assert isinstance(result.content, anthropic.types.WebSearchToolResultError)
        assert result.content.error_code == "unavailable"
        assert "not available" in text.text
        again = [*QUESTION, {"role": "assistant", "content": message.content}, *QUESTION]
        assert create(client, messages=again).content


def test_no_tokens_at_all_fill_the_cache(client: Client):
    question = [{"role": "user", "content": "Something that nobody asked before."}]
    nothing = create(client, max_tokens=0, messages=question)
    assert (nothing.content, nothing.usage.output_tokens) == ([], 0)
    assert create(client, messages=question).usage.input_tokens == 1


def test_what_clients_send_beside_changes_nothing(client: Client):
    message = create(
        client,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        metadata={"user_id": '{"session_id": "s"}'},
        output_config={"effort": "high"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        tools=[{"type": "web_search_20250305", "name": "web_search"}, DEPTH],
        tool_choice={"type": "auto"},
        extra_body={"context_management": {"edits": []}, "of_tomorrow": 1},
        extra_headers={"anthropic-beta": "of-tomorrow-2030-01-01", "anthropic-version": "2030-01-01"},
        extra_query={"beta": "true"},
    )
    assert text_of(message) == TEXT


def test_the_beta_client_is_answered_too(client: Client):
    message = client.call("beta.messages.create", **filled({"betas": ["context-management-2025-06-27"]}))
    assert text_of(message) == TEXT


# --------------------------------------------------------------------------------------------------- counting

COUNTED: dict[str, dict[str, Any]] = {
    "trivial": {"messages": [{"role": "user", "content": "foo"}]},
    "tools without a system text": {"messages": [{"role": "user", "content": "foo"}], "tools": [DEPTH]},
    "everything": {
        "system": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}],
        "messages": [*QUESTION, {"role": "assistant", "content": "Hello."}, *QUESTION],
        "tools": [DEPTH, {**DEPTH, "name": "late", "defer_loading": True}],
        "thinking": {"type": "disabled"},
        "tool_choice": {"type": "auto"},
    },
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_count_is_what_the_call_reads(name, client: Client):
    fields = COUNTED[name]
    counted = client.call("messages.count_tokens", model="claude-any", **fields)
    assert counted.input_tokens == prompt_tokens(create(client, **fields).usage)


@pytest.mark.thorough
def test_25_counts_at_once(scripted):
    async def run() -> list[int]:
        async with AsyncAnthropic(**options(scripted)) as client:

            async def count(number: int) -> int:
                fields: dict[str, Any] = {"messages": [{"role": "user", "content": "foo " * number}]}
                fields |= {"tools": [DEPTH]} if number % 2 else {}
                return (await client.messages.count_tokens(model="x", **fields)).input_tokens

            together = await asyncio.gather(*(count(number) for number in range(1, 26)))
            assert [await count(number) for number in range(1, 26)] == together
            return together

    assert len(set(asyncio.run(run()))) == 25


# ----------------------------------------------------------------------------------------------------- models


def test_the_loaded_model_is_listed(client: Client, scripted: Server):
    (model,) = client.call("models.list", limit=1000).data
    assert model.id == scripted.get("/v1/models")["data"][0]["id"]


# ----------------------------------------------------------------------------------------------------- errors


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"extra_body": {"temperature": 9}}, "'temperature'"),
        ({"messages": []}, "'messages'"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "'messages[0].role'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages.0.content.0.image: ",
        ),
        ({"max_tokens": -2}, "'max_tokens'"),
        ({"tools": [{}]}, "'tools[0].name'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("how", ["create", "stream"])
def test_a_bad_request_is_an_exception_that_names_the_field(how, fields, named, client: Client):
    with pytest.raises(anthropic.BadRequestError) as refused:
        {"create": create, "stream": stream}[how](client, **fields)
    error: Any = refused.value
    assert (error.status_code, error.type) == (400, "invalid_request_error")
    assert named in error.message
    assert error.body["type"] == "error"
    assert error.body["request_id"].startswith("req_")
    assert text_of(create(client)) == TEXT, "the next request is served"


def test_a_missing_limit_is_named(client: Client):
    with pytest.raises(anthropic.BadRequestError, match="max_tokens: Field required"):
        create(client, max_tokens=None, timeout=60)


@pytest.mark.sample(4)
def test_a_prompt_longer_than_the_window_is_refused_in_words_that_clients_know(random_client: Client):
    fields = {"messages": [{"role": "user", "content": "\x01" * 5000}]}
    counted = random_client.call("messages.count_tokens", model="x", **fields).input_tokens
    with pytest.raises(anthropic.BadRequestError) as refused:
        create(random_client, **fields)
    error: Any = refused.value.body
    assert error["error"]["message"] == f"prompt is too long: {counted} tokens > 4095 maximum"


def test_a_large_limit_is_a_ceiling(client: Client):
    assert text_of(create(client, max_tokens=10**6, stream=False, timeout=60)) == TEXT


def test_a_body_that_is_too_long_is_a_413(random_client: Client):
    with pytest.raises(anthropic.RequestTooLargeError) as refused:
        create(random_client, messages=[{"role": "user", "content": "x" * 100_000}])
    assert refused.value.type == "request_too_large"


def test_an_endpoint_that_is_not_there_is_not_found(client: Client):
    with pytest.raises(anthropic.NotFoundError):
        client.call("messages.batches.retrieve", "batch1")


@pytest.mark.thorough
def test_a_full_queue_is_an_exception_that_says_when_to_come_back(tiny_model):
    with serving(tiny_model("qwen3"), batch=1, max_waiting=1) as server:
        body: dict[str, Any] = {**filled({"max_tokens": ENDLESS}), "stream": True}
        with Anthropic(**options(server)) as client, client.messages.create(**body):
            until(lambda: server.get("/stats")["batch"]["active_rows"] == 1)
            with client.messages.create(**body):
                until(lambda: server.get("/stats")["engine"]["waiting"] == 1)
                with pytest.raises(anthropic.InternalServerError) as refused:
                    client.messages.create(**filled({}))
    assert (refused.value.status_code, refused.value.type) == (503, "overloaded_error")
    assert int(refused.value.response.headers["retry-after"]) > 0


def test_closing_a_stream_frees_the_engine(random):
    with Anthropic(**options(random)) as client:
        stream = client.messages.create(**filled({"max_tokens": ENDLESS}), stream=True)
        assert [next(stream) for _ in range(3)]
        stream.close()
        until(lambda: random.get("/stats")["batch"]["active_rows"] == 0, seconds=3)


def test_a_wrong_key_is_refused_by_the_proxy(scripted, endpoints):
    endpoint = endpoints.of(scripted, PROXIED)
    with Anthropic(base_url=endpoint.url, api_key="wrong", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "x", "messages": QUESTION}
        for ask in (client.messages.count_tokens, partial(client.messages.create, max_tokens=5)):
            with pytest.raises(anthropic.AuthenticationError, match="not a key of this server") as refused:
                ask(**asked)
            assert refused.value.type == "authentication_error"


@pytest.mark.sample(4)
def test_reasoning_that_is_not_to_be_shown_goes_round_in_its_signature(caller: Client):
    fields = {"tools": [DEPTH], "thinking": {"type": "adaptive", "display": "omitted"}}
    events, streamed = read(caller, **fields)
    assert "thinking" not in {event.type for event in events}
    whole = create(caller, **fields)
    for message in (whole, streamed):
        assert (message.content[0].type, message.content[0].thinking) == ("thinking", "")
        assert message.content[0].signature
    result = {"type": "tool_result", "tool_use_id": whole.content[2].id, "content": "459 m"}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [result]},
    ]
    second = create(caller, **fields, messages=messages)
    assert second.usage.cache_read_input_tokens >= prompt_tokens(whole.usage) + whole.usage.output_tokens - 1


def test_a_request_has_an_id_in_its_header(client: Client):
    message = create(client)
    counted = client.call("messages.count_tokens", model="x", messages=QUESTION)
    with pytest.raises(anthropic.BadRequestError) as refused:
        create(client, messages=[])
    error: Any = refused.value
    assert message._request_id == message.id
    assert error.request_id == error.body["request_id"]
    assert counted._request_id.startswith("req_")
    assert error.body["request_id"].startswith("req_")
