"""Prewarms, receipts, progress and diagnostics through the official packages, on both ports."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

import anthropic
import anthropic.types
import pytest

from tests.sdk.endpoints import (
    WAY_NAMES,
    WAYS,
    Client,
    Endpoints,
    Way,
    anthropic_client,
    openai_client,
)
from tests.serving import Server, serving

pytestmark = [pytest.mark.product, pytest.mark.sample(2)]

PREWARM: dict[str, Any] = {"prompt_cache_options": {"prewarm": True}}
PARTS = ("from_memory", "from_disk", "read", "told", "unread")


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5"])
def server(request: pytest.FixtureRequest, tiny_model: Any) -> Generator[Server]:
    """Dense, and with recurrent layers."""
    with serving(tiny_model(request.param, hidden=128, layers=2), thinking=False) as started:
        yield started


@pytest.fixture(scope="module", params=WAYS, ids=WAY_NAMES)
def way(request: pytest.FixtureRequest) -> Way:
    return request.param


@pytest.fixture(scope="module")
def of_openai(way: Way, server: Server, endpoints: Endpoints) -> Iterator[Client]:
    with closing(openai_client(way, server, endpoints)) as client:
        yield client


@pytest.fixture(scope="module")
def of_anthropic(way: Way, server: Server, endpoints: Endpoints) -> Iterator[Client]:
    with closing(anthropic_client(way, server, endpoints)) as client:
        yield client


def question(client: Client, words: str) -> list[Any]:
    """A question that no other client asks: all of them may have one server."""
    own = f"{client.endpoint.url} {type(client).__name__} {client.endpoint.is_proxied}"
    return [{"role": "user", "content": f"{own} {words} How deep is the sea at the pier?"}]


def chat(client: Client, words: str, **fields: Any) -> Any:
    asked = {"model": "any", "messages": question(client, words), "temperature": 0}
    return client.call("chat.completions.create", **{**asked, **fields})


def message(client: Client, words: str, **fields: Any) -> Any:
    asked = {"model": "any", "messages": question(client, words), "max_tokens": 3}
    return client.call("messages.create", **{**asked, **fields})


def sums_up(receipt: Any, prompt_tokens: int) -> None:
    assert sum(receipt[part] for part in PARTS) == receipt["prompt_tokens"] == prompt_tokens


@pytest.mark.parametrize("asking", [PREWARM, {"n_predict": 0}], ids=str)
def test_a_chat_that_was_prewarmed_reads_one_token(of_openai: Client, asking: dict[str, Any]):
    warm = chat(of_openai, str(asking), extra_body=asking)
    assert (warm.choices[0].message.content, warm.usage.completion_tokens) == ("", 0)
    reply = chat(of_openai, str(asking), max_tokens=3)
    assert (reply.usage.completion_tokens, reply.usage.prompt_tokens_details.cache_write_tokens) == (3, 1)
    assert reply.usage.prompt_tokens_details.cached_tokens == reply.usage.prompt_tokens - 1


def test_a_text_that_was_prewarmed_reads_one_token(of_openai: Client):
    (asked,) = question(of_openai, "text")
    fields = {"model": "any", "prompt": asked["content"], "temperature": 0}
    warm = of_openai.call("completions.create", **fields, max_tokens=0)
    assert (warm.choices[0].text, warm.usage.completion_tokens) == ("", 0)
    usage = of_openai.call("completions.create", **fields, max_tokens=3).usage
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


def test_a_response_that_was_prewarmed_reads_one_token(of_openai: Client):
    asked = {"model": "any", "input": question(of_openai, "response")}
    warm = of_openai.call("responses.create", **asked, **PREWARM)
    assert (warm.status, warm.output, warm.usage.output_tokens) == ("completed", [], 0)
    streamed = of_openai.read("responses.create", **asked, **PREWARM)
    assert (streamed[-1].type, streamed[-1].response.output) == ("response.completed", [])
    usage = of_openai.call("responses.create", **asked, max_output_tokens=3).usage
    assert usage.input_tokens_details.cached_tokens == usage.input_tokens - 1
    assert usage.input_tokens_details.cache_write_tokens == 1


def test_a_message_that_was_prewarmed_reads_one_token(of_anthropic: Client):
    warm = message(of_anthropic, "warm", max_tokens=0)
    assert (warm.content, warm.stop_reason, warm.usage.output_tokens) == ([], "max_tokens", 0)
    assert message(of_anthropic, "warm").usage.input_tokens == 1


def test_what_an_agent_begins_with_is_warmed(of_openai: Client):
    rules = f"You answer at {of_openai.endpoint.url}, {type(of_openai).__name__}. " * 9
    messages = [{"role": "system", "content": rules}, *question(of_openai, "warm")]
    chat(of_openai, "warm", messages=messages, max_tokens=2)

    def warmed(programs: list[str]) -> Any:
        asked = {"programs": programs}
        return of_openai.call("post", "/cache/warm", body=asked, cast_to=object)["beginnings"]

    receipt = warmed([])[0]
    assert receipt["from_memory"] == receipt["prompt_tokens"] - 1 > 64
    assert warmed(["lighthouse"]) == [], "another program"


def test_receipts_sum_up_whole_and_streamed(of_openai: Client, of_anthropic: Client):
    header = {"extra_headers": {"x-start-llm-receipt": "1"}}
    usage = chat(of_openai, "receipt", max_tokens=3, **header).usage
    sums_up(usage.receipt, usage.prompt_tokens)
    chunks = of_openai.read(
        "chat.completions.create",
        model="any",
        messages=question(of_openai, "receipt"),
        max_tokens=3,
        extra_body={"return_receipt": True},
    )
    sums_up(chunks[-1].usage.receipt, usage.prompt_tokens)
    reply = message(of_anthropic, "receipt", **header)
    sums_up(reply.usage.receipt, reply.usage.input_tokens + reply.usage.cache_read_input_tokens)
    asked = {"model": "any", "max_tokens": 3, "messages": question(of_anthropic, "receipt")}
    *_, delta, _ = of_anthropic.read("messages.create", **asked, extra_body={"return_receipt": True})
    sums_up(delta.usage.receipt, reply.usage.receipt["prompt_tokens"])
    response = of_openai.call(
        "responses.create", model="any", input="How deep?", max_output_tokens=3, **header
    )
    sums_up(response.usage.receipt, response.usage.input_tokens)


@pytest.mark.sample(4)
def test_progress_comes_in_chunks_of_a_chat(of_openai: Client):
    chunks = of_openai.read(
        "chat.completions.create",
        model="any",
        messages=question(of_openai, "progress " * 400),
        max_tokens=3,
        extra_body={"return_progress": True},
    )
    progress = [chunk.prompt_progress for chunk in chunks if hasattr(chunk, "prompt_progress")]
    assert progress[0]["cache"] == progress[0]["processed"] < 100
    assert progress[-1]["processed"] == progress[-1]["total"] - 1 == chunks[-1].usage.prompt_tokens - 1


def test_every_field_of_a_message_gets_to_the_server(of_anthropic: Client):
    with pytest.raises(anthropic.BadRequestError, match="min_p"):
        message(of_anthropic, "fields", extra_body={"min_p": 2})


def test_diagnostics_have_the_types_of_the_sdk(of_anthropic: Client):
    system = f"Be brief, {of_anthropic.endpoint.url}. " * 20

    def ask(previous: str | None, **fields: Any) -> anthropic.types.Message:
        compared = {"diagnostics": {"previous_message_id": previous}}
        return message(of_anthropic, "diagnostics", **{"system": system, **compared, **fields})

    first = ask(None)
    assert first.diagnostics is None
    changed = ask(first.id, system="Otherwise. " * 20).diagnostics
    assert isinstance(changed, anthropic.types.Diagnostics)
    assert isinstance(changed.cache_miss_reason, anthropic.types.CacheMissSystemChanged)
    assert changed.cache_miss_reason.cache_missed_input_tokens > 20
    unknown = ask("msg_never").diagnostics
    assert unknown is not None
    assert isinstance(unknown.cache_miss_reason, anthropic.types.CacheMissPreviousMessageNotFound)
    start, *_ = of_anthropic.read(
        "messages.create",
        model="any",
        max_tokens=3,
        system="Otherwise still. " * 20,
        messages=question(of_anthropic, "diagnostics"),
        diagnostics={"previous_message_id": first.id},
    )
    assert start.type == "message_start"
    assert isinstance(start.message.diagnostics.cache_miss_reason, anthropic.types.CacheMissSystemChanged)
