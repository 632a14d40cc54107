"""Whether anybody waits for a request: its word, known clients' side requests, and the tier of replies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from anthropic.types import Message as AnthropicMessage
from anthropic.types.raw_message_start_event import RawMessageStartEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from start_llm.protocols.anthropic import messages
from start_llm.protocols.base import ParsedRequest, Parser
from start_llm.protocols.openai import chat_completions, completions
from start_llm.protocols.responses import create
from start_llm.protocols.urgency import SIDE_REQUESTS, is_background, service_tier
from tests.protocols.helpers import CONTEXT, body, events

HELLO: Any = [{"role": "user", "content": "Hello"}]
PRIORITY = "x-start-llm-priority"
TOOL: Any = {"type": "function", "function": {"name": "read"}}
TITLE: Any = {
    "type": "json_schema",
    "schema": {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]},
}
OPENCODE = "You are a title generator. You output ONLY a thread title. Nothing else.\n\n<task>"
QWEN_CODE = "Generate a concise, sentence-case title (3-7 words) that captures what this session is about."


def gives_way(parse: Parser, headers: dict[str, str] | None = None, /, **fields: Any) -> bool:
    asked = body(**fields)
    return is_background(asked, headers or {}, parse(asked, headers or {}, CONTEXT).request)


def chat_gives_way(headers: dict[str, str] | None = None, /, **fields: Any) -> bool:
    return gives_way(chat_completions.parse, headers, **{"messages": HELLO, **fields})


# ------------------------------------------------------------------------------------- what it says of itself


@pytest.mark.parametrize(
    ("tier", "is_it"),
    [("flex", True), ("priority", False), ("fast", False), ("default", False), ("auto", False), (None, False)]
    + [(wrong, False) for wrong in ("Flex", "", 7, [], {}, True)],
)
def test_flex_gives_way_and_what_is_no_tier_is_no_error(tier: Any, is_it: bool):
    assert chat_gives_way(service_tier=tier) == is_it
    assert gives_way(create.parse, input="Hello", service_tier=tier) == is_it


@pytest.mark.parametrize(
    ("word", "is_it"),
    [("background", True), (" Background ", True), ("normal", False), ("low", None), ("", None)],
)
def test_the_header_says_it_of_any_request_and_counts_before_all_else(word: str, is_it: bool | None):
    headers = {PRIORITY: word}
    title = [{"role": "system", "content": OPENCODE}, *HELLO]
    assert gives_way(completions.parse, headers, prompt="Hello") == bool(is_it)
    assert chat_gives_way(headers) == bool(is_it)
    assert chat_gives_way(headers, service_tier="flex") == (is_it is not False)
    assert chat_gives_way(headers, messages=title) == (is_it is not False)


def test_a_client_that_asks_for_speed_waits_whatever_its_request_looks_like():
    title = [{"role": "system", "content": OPENCODE}, *HELLO]
    assert chat_gives_way(messages=title)
    assert not chat_gives_way(messages=title, service_tier="priority")


# ---------------------------------------------------------------------------------------------- known clients


@pytest.mark.parametrize(
    ("name", "word", "is_it"),
    [
        ("x-claude-code-request-class", "main", False),
        ("x-claude-code-request-class", "compaction", False),
        ("x-claude-code-request-class", "subagent", False),
        ("x-claude-code-request-class", " Auxiliary ", True),
        ("x-claude-code-request-class", "é", False),
        ("x-openai-subagent", "memory_consolidation", True),
        ("x-openai-subagent", "collab_spawn", False),
        ("x-openai-subagent", "review", False),
        ("x-openai-subagent", "compact", False),
    ],
)
def test_clients_say_in_headers_what_nobody_waits_for(name: str, word: str, is_it: bool):
    """Somebody waits for a sub-agent: the agent that sent it, and its user."""
    assert chat_gives_way({name: word}) == is_it


def test_titles_of_claude_code_are_known_by_their_form():
    asked = {"messages": HELLO, "max_tokens": 100, "stream": True}
    schema = TITLE["schema"]
    with_branch = {**schema, "properties": {**schema["properties"], "branch": {"type": "string"}}}
    more = {**schema, "properties": {**schema["properties"], "text": {"type": "string"}}}
    assert gives_way(messages.parse, **asked, output_config={"format": TITLE})
    assert gives_way(messages.parse, **asked, output_config={"format": {**TITLE, "schema": with_branch}})
    assert not gives_way(messages.parse, **asked, output_config={"format": {**TITLE, "schema": more}})
    tools = [{"name": "read", "input_schema": {"type": "object"}}]
    assert not gives_way(messages.parse, **asked, output_config={"format": TITLE}, tools=tools)
    assert not gives_way(messages.parse, **asked)


@pytest.mark.parametrize("beginning", [OPENCODE, f"\n{QWEN_CODE}"])
def test_titles_are_known_by_the_beginning_of_their_instructions(beginning: str):
    def asked(role: str, text: str) -> list[Any]:
        return [{"role": role, "content": text}, *HELLO]

    assert chat_gives_way(messages=asked("system", beginning))
    assert chat_gives_way(messages=asked("developer", beginning))
    assert gives_way(create.parse, input="Hello", instructions=beginning)
    assert gives_way(messages.parse, messages=HELLO, max_tokens=9, system=beginning)
    assert not chat_gives_way(messages=asked("user", beginning)), "a user may quote it"
    assert not chat_gives_way(messages=asked("system", f"You help. {beginning}"))


def test_the_manual_has_every_kind_of_side_request():
    manual = Path("docs/api.md").read_text(encoding="utf-8")
    for row in SIDE_REQUESTS:
        assert f"| {row.what} | {row.source} |" in manual


# ------------------------------------------------------------------------------------------- tiers of replies


@pytest.mark.parametrize(
    ("asked", "tier"),
    [("flex", "flex"), ("auto", "default"), ("default", "default"), ("priority", "default"), (None, None)]
    + [(wrong, None) for wrong in ([], 7)],
)
def test_a_reply_says_how_it_was_served_if_the_request_asks_for_a_tier(asked: Any, tier: str | None):
    fields = {} if asked is None else {"service_tier": asked}
    chat = chat_completions.parse(body(messages=HELLO, **fields), {}, CONTEXT)
    outputs, end = events([0, 1])
    whole = ChatCompletion.model_validate(chat.reply.whole(outputs, end), strict=True)
    assert whole.service_tier == tier
    chunk, *_ = (frame for output in outputs for frame in chat.reply.output(output))
    assert ChatCompletionChunk.model_validate_json(str(chunk.data)).service_tier == tier
    response = create.parse(body(input="Hello", **fields), {}, CONTEXT)
    assert Response.model_validate(response.reply.whole(outputs, end)).service_tier == tier


def test_a_request_that_its_header_keeps_normal_is_not_flex():
    assert service_tier(body(service_tier="flex"), {PRIORITY: "normal"}) == "default"
    assert service_tier(body(service_tier="flex"), {PRIORITY: "background"}) == "flex"


def test_messages_are_of_the_standard_tier():
    parsed: ParsedRequest = messages.parse(body(messages=HELLO, max_tokens=9), {}, CONTEXT)
    outputs, end = events([0, 1])
    assert AnthropicMessage.model_validate(parsed.reply.whole(outputs, end)).usage.service_tier == "standard"
    opening, *_ = parsed.reply.opening(7)
    start = RawMessageStartEvent.model_validate(opening.data)
    assert start.message.usage.service_tier == "standard"
