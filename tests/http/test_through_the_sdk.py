"""The official openai package makes the same of every reply, streamed or not."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.http.conftest import FamilyServer, Hearing
from tests.http.forms import FORMS, THINKING, TOOLS
from tests.http.reading import QUESTION, Called, ReplyContent
from tests.http.scripts import asking
from tests.server.client import without_cached

EVERY = list(FORMS)
SCRIPTS = [(name, "reasoned_call" if name in THINKING else "prose") for name in EVERY]


@pytest.fixture
def request_of(family: FamilyServer) -> Iterator[Any]:
    """The client for a family's server, and the request for a script."""
    clients: list[OpenAI] = []

    def of(name: str, script: str) -> tuple[OpenAI, dict[str, Any]]:
        clients.append(OpenAI(base_url=f"{family(name).url}/v1", api_key="local", max_retries=0))
        thinking = {"thinking": {"type": "enabled" if script.startswith("reasoned") else "disabled"}}
        fields = {"model": "any", "messages": QUESTION, "tools": TOOLS}
        return clients[-1], {**fields, "extra_body": {**asking(script), **thinking}}

    yield of
    for client in clients:
        client.close()


def content_of(message: Any, finish: str) -> ReplyContent:
    return ReplyContent(
        content=message.content,
        reasoning=getattr(message, "reasoning_content", None) or "",
        calls=tuple(Called(call.function.name, call.function.arguments) for call in message.tool_calls or ()),
        finish=finish,
    )


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "script"), SCRIPTS)
def test_a_whole_reply(name, script, request_of, hearing: Hearing):
    client, request = request_of(name, script)
    (choice,) = client.chat.completions.create(**request).choices
    assert content_of(choice.message, choice.finish_reason) == hearing(name, script).reply
    assert [call.type for call in choice.message.tool_calls] == ["function"]


@pytest.mark.parametrize(("name", "script"), SCRIPTS)
@pytest.mark.sample(20)
def test_a_stream_read_chunk_by_chunk(name, script, request_of, hearing: Hearing):
    client, request = request_of(name, script)
    content, reasoning, calls, finish = "", "", dict[int, Called](), ""
    for chunk in client.chat.completions.create(stream=True, **request):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for part in choice.delta.tool_calls or ():
            begun = calls.setdefault(part.index, Called(part.function.name, "", part.id))
            calls[part.index] = Called(begun.name, begun.arguments + part.function.arguments, begun.id)
        finish = choice.finish_reason or finish
    assert (
        ReplyContent(content=content, reasoning=reasoning, calls=tuple(calls.values()), finish=finish)
        == hearing(name, script).reply
    )


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "script"), [*SCRIPTS, ("glm", "pair"), ("kimi", "pair")])
def test_a_stream_put_together_by_the_sdk(name, script, request_of, hearing: Hearing):
    client, request = request_of(name, script)
    with client.chat.completions.stream(**request, stream_options={"include_usage": True}) as stream:
        kinds = {event.type for event in stream}
        completion = stream.get_final_completion()
    (choice,) = completion.choices
    heard = hearing(name, script).reply
    assert content_of(choice.message, choice.finish_reason).calls == heard.calls
    assert choice.message.content == heard.content
    assert without_cached(completion.usage.model_dump(exclude_unset=True)) == without_cached(
        hearing(name, script).usage
    )
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert all(isinstance(call.function.parsed_arguments, dict) for call in choice.message.tool_calls)
