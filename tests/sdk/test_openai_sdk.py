"""The official openai package is the client, synchronous and asynchronous."""

import asyncio
import json
import time
from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.sdk.endpoints import KEY, PROXIED, WAY_NAMES, WAYS, Client, openai_client
from tests.server import client as raw
from tests.serving import Server, serving

pytestmark = [pytest.mark.product, pytest.mark.sample(2)]

HELLO = ["Hello", ", how", " are", " you", " to", "day?", "\nFine.", b" \xf0\x9f", b"\x90\x9f"]
TEXT = "Hello, how are you today?\nFine. 🐟"
QUESTION = [{"role": "user", "content": "Say hello."}]
CHAT, TEXT_COMPLETION = "chat.completions", "completions"
ENDPOINTS = {CHAT: {"messages": QUESTION}, TEXT_COMPLETION: {"prompt": "\n"}}

ENDLESS = 100_000
"""Tokens; the random model never ends by itself."""


def create(client: Client, endpoint: str, **fields: Any) -> Any:
    return client.call(f"{endpoint}.create", **filled(endpoint, fields))


def stream(client: Client, endpoint: str, **fields: Any) -> list[Any]:
    return client.read(f"{endpoint}.create", **filled(endpoint, fields))


def options(server: Server) -> dict[str, Any]:
    return {"base_url": f"{server.url}/v1", "api_key": KEY, "max_retries": 0}


def filled(endpoint: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": "any-name", **ENDPOINTS[endpoint], **fields}


@pytest.fixture(scope="module")
def folder(chain_model) -> Path:
    return chain_model({"\n": HELLO})


@pytest.fixture(scope="module")
def scripted(folder) -> Generator[Server]:
    """Says TEXT, whatever it is asked."""
    with serving(folder) as server:
        yield server


@pytest.fixture(scope="module")
def random(tiny_model) -> Generator[Server]:
    """Says something else at every seed, and never ends."""
    with serving(tiny_model("qwen3"), max_kv_size=4096, max_body_bytes=100_000) as server:
        yield server


@pytest.fixture(scope="module", params=WAYS, ids=WAY_NAMES)
def client(request, scripted, endpoints) -> Generator[Client]:
    with closing(openai_client(request.param, scripted, endpoints)) as client:
        yield client


@pytest.fixture(scope="module", params=WAYS, ids=WAY_NAMES)
def random_client(request, random, endpoints) -> Generator[Client]:
    with closing(openai_client(request.param, random, endpoints)) as client:
        yield client


def text_of(endpoint: str, answer: Any) -> str:
    (choice,) = answer.choices
    return choice.message.content if endpoint == CHAT else choice.text


def streamed_text(endpoint: str, chunks: list[Any]) -> str:
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    return "".join((choice.delta.content or "") if endpoint == CHAT else choice.text for choice in choices)


def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# ---------------------------------------------------------------------------------------------------- replies


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_whole_reply(endpoint, client, folder):
    answer = create(client, endpoint, model="gpt-5")
    assert text_of(endpoint, answer) == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.model, answer.system_fingerprint) == ("gpt-5", folder.name)
    assert answer.object == ("chat.completion" if endpoint == CHAT else "text_completion")
    assert abs(answer.created - time.time()) < 60
    if endpoint == CHAT:
        assert answer.choices[0].message.role == "assistant"


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_stream_says_the_same_as_the_whole_reply(endpoint, client):
    chunks = stream(client, endpoint)
    assert streamed_text(endpoint, chunks) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len({chunk.id for chunk in chunks}) == 1
    if endpoint == CHAT:
        assert chunks[0].choices[0].delta.role == "assistant"
        assert not any(chunk.choices[0].delta.role for chunk in chunks[1:])


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_usage_counts_prompt_and_reply(endpoint, client):
    usage = create(client, endpoint).usage
    assert usage.completion_tokens == len(HELLO) + 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 <= usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
    if endpoint == TEXT_COMPLETION:
        counted = create(client, endpoint, prompt=[1, 2, 3], max_tokens=1).usage
        assert (counted.prompt_tokens, counted.completion_tokens) == (3, 1)


def without_cached(usage: Any) -> dict[str, Any]:
    return raw.without_cached(usage.model_dump())


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_stream_gives_usage_in_a_chunk_of_its_own_to_those_who_ask(endpoint, client):
    *chunks, last = stream(client, endpoint, stream_options={"include_usage": True})
    assert last.choices == []
    assert without_cached(last.usage) == without_cached(create(client, endpoint).usage)
    assert all(chunk.usage is None for chunk in chunks)
    (*_, plain) = stream(client, endpoint)
    assert without_cached(plain.usage) == without_cached(last.usage)
    assert plain.choices


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_limit_ends_the_reply_with_length(endpoint, client):
    for field in ("max_tokens", "max_completion_tokens"):
        fields = {field: 2} if endpoint == CHAT else {"extra_body": {field: 2}}
        answer = create(client, endpoint, **fields)
        assert (text_of(endpoint, answer), answer.choices[0].finish_reason) == ("Hello, how", "length")


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (" are", "Hello, how"),
        ("lo, how are y", "Hel"),
        (["nothing", "y?\n", "today"], "Hello, how are you "),
        (["you", "how", "are"], "Hello, "),
        ("Hello", ""),
        ("🐟", "Hello, how are you today?\nFine. "),
        (["never said"], TEXT),
    ],
    ids=str,
)
def test_a_stop_string_ends_the_reply_before_it_also_across_tokens(endpoint, stop, text, client):
    answer = create(client, endpoint, stop=stop)
    assert (text_of(endpoint, answer), answer.choices[0].finish_reason) == (text, "stop")
    assert streamed_text(endpoint, stream(client, endpoint, stop=stop)) == text


@pytest.mark.thorough
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_seed_gives_the_same_text_again_and_another_seed_another(endpoint, random_client):
    def sampled(seed: int | None) -> str:
        fields = {"temperature": 1, "seed": seed, "max_tokens": 20, "extra_body": {"top_k": 0, "min_p": 0}}
        return text_of(endpoint, create(random_client, endpoint, **fields))

    first = sampled(7)
    assert sampled(7) == first
    assert len({first, sampled(8), sampled(-1), sampled(2**63 - 1)}) == 4
    assert sampled(None) != sampled(None)
    chunks = stream(
        random_client, endpoint, temperature=1, seed=7, max_tokens=20, extra_body={"top_k": 0, "min_p": 0}
    )
    assert streamed_text(endpoint, chunks) == first


@pytest.mark.sample(4)
def test_chat_log_probabilities_belong_to_the_tokens_of_the_text(random_client):
    fields = {"logprobs": True, "top_logprobs": 3, "max_tokens": 8, "temperature": 0}
    answer = create(random_client, CHAT, **fields)
    entries = answer.choices[0].logprobs.content
    assert b"".join(bytes(item.bytes) for item in entries).decode() == text_of(CHAT, answer)
    for entry in entries:
        best, *others = entry.top_logprobs
        assert len(others) == 2
        assert (best.token, best.logprob) == (entry.token, entry.logprob)
        assert 0 >= best.logprob >= others[0].logprob >= others[1].logprob
    chunks = stream(random_client, CHAT, **fields)
    streamed = [item for chunk in chunks if (scores := chunk.choices[0].logprobs) for item in scores.content]
    assert [item.token for item in streamed] == [item.token for item in entries]
    assert [item.logprob for item in streamed] == pytest.approx([item.logprob for item in entries], abs=1e-4)


@pytest.mark.sample(4)
def test_no_log_probabilities_unless_they_are_asked_for(client):
    assert create(client, CHAT).choices[0].logprobs is None
    assert create(client, CHAT, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    assert create(client, TEXT_COMPLETION).choices[0].logprobs is None


def test_text_log_probabilities_tell_where_each_token_stands(random_client):
    fields = {"logprobs": 2, "max_tokens": 8, "temperature": 0}
    answer = create(random_client, TEXT_COMPLETION, **fields)
    scored, text = answer.choices[0].logprobs, text_of(TEXT_COMPLETION, answer)
    assert "".join(scored.tokens) == text
    for token, logprob, top, offset in zip(
        scored.tokens, scored.token_logprobs, scored.top_logprobs, scored.text_offset, strict=True
    ):
        assert text[offset:].startswith(token)
        assert top[token] == max(top.values()) == logprob
    columns = [chunk.choices[0].logprobs for chunk in stream(random_client, TEXT_COMPLETION, **fields)]
    assert [value for column in columns if column for value in column.tokens] == scored.tokens
    assert [value for column in columns if column for value in column.text_offset] == scored.text_offset


@pytest.mark.sample(4)
def test_a_prompt_may_be_token_ids(random_client):
    first, second = (
        create(random_client, TEXT_COMPLETION, prompt=prompt, temperature=0, max_tokens=8)
        for prompt in ([11, 12, 13], [[11, 12, 13]])
    )
    assert text_of(TEXT_COMPLETION, first) == text_of(TEXT_COMPLETION, second) != ""
    assert first.usage.prompt_tokens == 3


@pytest.mark.sample(4)
def test_conversations_with_tools_parts_and_developers_are_taken(client):
    function = {"name": "depth", "description": "of a sea", "parameters": {"type": "object"}}
    call = {
        "id": "call1",
        "type": "function",
        "function": {"name": "depth", "arguments": '{"sea": "Baltic"}'},
    }
    messages = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "How deep"}, {"type": "text", "text": " is it?"}],
        },
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "9 m", "tool_call_id": "call1"},
    ]
    tools = [{"type": "function", "function": function}]
    answer = create(
        client, CHAT, messages=messages, tools=tools, tool_choice="auto", parallel_tool_calls=True
    )
    assert text_of(CHAT, answer) == TEXT
    without = create(client, CHAT, messages=messages, tools=tools, tool_choice="none")
    assert without.usage.prompt_tokens == answer.usage.prompt_tokens


def test_fields_that_the_server_does_not_know_change_nothing(client):
    fields = {"thinking_style": {"x": [1]}, "provider": "x", "top_a": 0.5}
    answer = create(
        client, CHAT, extra_body=fields, extra_headers={"x-session-id": "abc"}, user="me", store=True
    )
    assert text_of(CHAT, answer) == TEXT
    assert streamed_text(CHAT, stream(client, CHAT, extra_body=fields, extra_query={"a": "b"})) == TEXT


def test_the_sdks_own_stream_reader_puts_the_reply_together(scripted):
    with (
        OpenAI(**options(scripted)) as client,
        client.chat.completions.stream(model="x", messages=[{"role": "user", "content": "hi"}]) as stream,
    ):
        kinds = {event.type for event in stream}
        completion = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert completion.choices[0].message.content == TEXT
    assert completion.choices[0].finish_reason == "stop"


CALLING = ["<think>", "Hm.", "</think>", "Let me look.", "<tool_call>", '{"name": "depth", "arguments": ',
           '{"sea": "Baltic"}}', "</tool_call>"]  # fmt: skip
DEPTH: dict[str, Any] = {
    "type": "function",
    "function": {"name": "depth", "strict": True, "parameters": {"type": "object", "properties": {}}},
}


def test_reasoning_and_a_call_arrive_whole_and_streamed(chain_model):
    asked: dict[str, Any] = {"model": "x", "messages": QUESTION, "tools": [DEPTH]}
    with serving(chain_model({"\n": CALLING})) as server, OpenAI(**options(server)) as client:
        whole: Any = client.chat.completions.create(**asked)
        with client.chat.completions.stream(**asked) as stream:
            kinds = {event.type for event in stream}
            streamed: Any = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    for completion in (whole, streamed):
        (choice,) = completion.choices
        assert (choice.message.content, choice.finish_reason) == ("Let me look.", "tool_calls")
        assert choice.message.reasoning_content == "Hm."
        (call,) = choice.message.tool_calls
        assert (call.type, call.function.name) == ("function", "depth")
        assert json.loads(call.function.arguments) == {"sea": "Baltic"}
    assert whole.usage.completion_tokens == len(CALLING) + 1
    assert whole.usage.completion_tokens_details.reasoning_tokens == 3


@pytest.mark.thorough
def test_a_custom_call_arrives_whole_and_streamed_and_goes_round(chain_model):
    """The model's text is not of the tool's form, so the text is all that it wrote."""
    tool = {"type": "custom", "custom": {"name": "depth", "description": "of a sea"}}
    asked: dict[str, Any] = {"model": "x", "messages": QUESTION, "tools": [tool]}
    with serving(chain_model({"\n": CALLING})) as server, OpenAI(**options(server)) as client:
        message: Any = client.chat.completions.create(**asked).choices[0].message
        chunks: Any = list(client.chat.completions.create(**asked, stream=True))
        (call,) = message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "9 m"}
        turns: Any = {**asked, "messages": [*QUESTION, message, result]}
        again: Any = client.chat.completions.create(**turns)
    assert (call.type, call.custom.name) == ("custom", "depth")
    assert json.loads(call.custom.input) == {"sea": "Baltic"}
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
    assert [part.type for part in parts] == ["custom", None]
    assert "".join(part.custom["input"] for part in parts) == call.custom.input
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert again.choices[0].finish_reason == "tool_calls"


@pytest.mark.thorough
def test_four_at_once_get_what_each_gets_alone(random):
    async def run() -> list[tuple[str, str]]:
        async with AsyncOpenAI(**options(random)) as client:

            async def ask(number: int) -> str:
                answer = await client.completions.create(
                    model="x", prompt=f"Fish number {number}", max_tokens=30, temperature=1, seed=number
                )
                return answer.choices[0].text

            together = await asyncio.gather(*(ask(number) for number in range(4)))
            return [(text, await ask(number)) for number, text in enumerate(together)]

    pairs = asyncio.run(run())
    assert len({text for text, _ in pairs}) == 4
    # A random model has near-ties, and a batch adds in another order: most of the texts have to be the same.
    assert sum(together == alone for together, alone in pairs) >= 3


# ----------------------------------------------------------------------------------------------------- models


def test_the_loaded_model_is_listed_and_retrieved(client, folder):
    (model,) = client.call("models.list").data
    assert (model.id, model.object, model.owned_by) == (folder.name, "model", "start_llm")
    assert client.call("models.retrieve", folder.name) == model


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as missing:
        client.call("models.retrieve", "gpt-5")
    assert missing.value.status_code == 404
    assert missing.value.type == "not_found_error"
    assert missing.value.param == "model"


# ----------------------------------------------------------------------------------------------------- errors


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 9}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"extra_body": {"top_k": -1}}, "top_k"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("how", ["create", "stream"])
def test_a_bad_request_is_an_exception_that_names_the_field(how, fields, param, client):
    with pytest.raises(openai.BadRequestError) as refused:
        {"create": create, "stream": stream}[how](client, CHAT, **fields)
    error = refused.value
    assert (error.status_code, error.param, error.type) == (400, param, "invalid_request_error")
    assert f"'{param}'" in error.message
    assert text_of(CHAT, create(client, CHAT)) == TEXT, "the next request is served"


def test_a_prompt_longer_than_the_window_has_its_own_code(random_client):
    with pytest.raises(openai.BadRequestError) as refused:
        create(random_client, TEXT_COMPLETION, prompt=[7] * 4096)
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.param == "prompt"
    assert "4096 tokens" in refused.value.message


def test_a_chat_longer_than_the_window_is_refused_in_words_that_clients_know(random_client):
    with pytest.raises(openai.BadRequestError, match="maximum context length is 4096 tokens") as refused:
        create(random_client, CHAT, messages=[{"role": "user", "content": "\x01" * 5000}])
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")


def test_a_body_that_is_too_long_is_a_413(random_client):
    with pytest.raises(openai.APIStatusError) as refused:
        create(random_client, CHAT, messages=[{"role": "user", "content": "x" * 100_000}])
    assert refused.value.status_code == 413
    assert "MAX_BODY_BYTES" in refused.value.message


def test_an_endpoint_that_is_not_there_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as missing:
        client.call("moderations.create", model="x", input="y")
    assert "/v1/moderations" in missing.value.message


def test_a_model_that_makes_no_embeddings_says_so(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.call("embeddings.create", model="x", input="y")
    assert refused.value.param == "model"
    assert "makes no embeddings" in refused.value.message


@pytest.mark.thorough
def test_a_full_queue_is_an_exception_that_says_when_to_come_back(tiny_model):
    with serving(tiny_model("qwen3"), batch=1, max_waiting=1) as server:
        body: dict[str, Any] = {"model": "x", "prompt": "x", "max_tokens": ENDLESS, "stream": True}
        with OpenAI(**options(server)) as client, client.completions.create(**body):
            until(lambda: server.get("/stats")["batch"]["active_rows"] == 1)
            with client.completions.create(**body):
                until(lambda: server.get("/stats")["engine"]["waiting"] == 1)
                with pytest.raises(openai.InternalServerError) as refused:
                    client.completions.create(model="x", prompt="x")
    assert refused.value.status_code == 503
    assert refused.value.type == "overloaded_error"
    assert int(refused.value.response.headers["retry-after"]) > 0


# ---------------------------------------------------------------------------------------------------- leaving


def is_free(server: Server) -> bool:
    stats = server.get("/stats")
    return stats["batch"]["active_rows"] == stats["requests"]["in_flight"] == 0


def endings(server: Server) -> int:
    return server.get("/stats")["requests"]["endings"].get("cancelled", 0)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_closing_a_stream_frees_the_engine(endpoint, random):
    before = endings(random)
    with OpenAI(**options(random)) as client:
        create = attrgetter(endpoint)(client).create
        stream = create(model="x", stream=True, max_tokens=ENDLESS, **ENDPOINTS[endpoint])
        assert [next(stream) for _ in range(3)]
        assert not is_free(random)
        stream.close()
        until(lambda: is_free(random), seconds=3)
    assert endings(random) == before + 1


def test_closing_an_asynchronous_stream_frees_the_engine(random):
    before = endings(random)

    async def run() -> None:
        async with AsyncOpenAI(**options(random)) as client:
            stream = await client.completions.create(model="x", prompt="x", stream=True, max_tokens=ENDLESS)
            async for _ in stream:
                break
            await stream.close()
            await asyncio.to_thread(until, lambda: is_free(random), 3)

    asyncio.run(run())
    assert endings(random) == before + 1


@pytest.mark.thorough
def test_a_client_that_gives_up_waiting_frees_the_engine(random):
    before = endings(random)
    with OpenAI(**options(random), timeout=0.5) as client, pytest.raises(openai.APITimeoutError):
        client.completions.create(model="x", prompt="x", max_tokens=ENDLESS)
    until(lambda: is_free(random), seconds=3)
    assert endings(random) == before + 1


def test_a_wrong_key_is_refused_by_the_proxy(scripted, endpoints):
    endpoint = endpoints.of(scripted, PROXIED)
    with OpenAI(base_url=f"{endpoint.url}/v1", api_key="wrong", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "x", "messages": QUESTION}
        for ask in (client.models.list, partial(client.chat.completions.create, **asked)):
            with pytest.raises(openai.AuthenticationError, match="not a key of this server"):
                ask()
