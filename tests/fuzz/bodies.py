"""Bodies as clients send them, of each protocol."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.http.forms import ANSWER, FORMS, OTHER, PATH, PROSE, REASONING, TOOLS, answers, reasoning_texts
from tests.http.scripts import asking

type Body = dict[str, Any]

FORM = FORMS["hermes"]
TRAIT = FORM.trait
SCRIPTS = {**reasoning_texts(FORM), **answers(FORM)}
STARTS = {FORM.tail: "Whatever was asked, this is said. ⚓", FORM.tail_off: "Nothing was reasoned about it."}
CHAT, TEXT, MESSAGES, RESPONSES = "chat", "text", "messages", "responses"
DOWNLOAD = "download"
_ECHOES = Path(__file__).resolve().parent.parent / "tests" / "transcripts" / "echoes"


@dataclass(frozen=True, slots=True)
class Expected:
    """The words that a reply has to say."""

    reasoning: str = ""
    text: str = ""
    calls: tuple[tuple[str, Any], ...] = ()


EXPECTED = {
    "answer": Expected(text=ANSWER),
    "call": Expected(calls=(PATH,)),
    "pair": Expected(calls=(PATH, OTHER)),
    "prose": Expected(text=PROSE, calls=(PATH,)),
    "reasoned": Expected(reasoning=REASONING, text=ANSWER),
    "reasoned_call": Expected(reasoning=REASONING, calls=(PATH,)),
}


def scripted(protocol: str, script: str, random: Random) -> Body:
    """A conversation whose next reply is known."""
    thinks = script.startswith("reasoned")
    return _SCRIPTED[protocol](random, script, thinks) | {"stream": random.random() < 0.5}


def _scripted_chat(random: Random, script: str, thinks: bool) -> Body:
    messages = _chat(random)["messages"]
    return {"messages": messages, "tools": TOOLS, "enable_thinking": thinks, **asking(script)}


def _scripted_messages(random: Random, script: str, thinks: bool) -> Body:
    tools = [_anthropic(tool) for tool in TOOLS]
    thinking = {"type": "enabled", "budget_tokens": 1024} if thinks else {"type": "disabled"}
    messages = _messages(random)["messages"]
    return {"messages": messages, "tools": tools, "max_tokens": 900, "thinking": thinking, **asking(script)}


def _scripted_response(random: Random, script: str, thinks: bool) -> Body:
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    effort = {"effort": "high" if thinks else "none"}
    return {"input": _response(random)["input"], "tools": tools, "reasoning": effort, **asking(script)}


def _scripted_text(random: Random, script: str, thinks: bool) -> Body:
    return {"prompt": f"{_words(random)} <|script:{script}|>", "max_tokens": 900}


_SCRIPTED: dict[str, Callable[[Random, str, bool], Body]] = {
    CHAT: _scripted_chat,
    MESSAGES: _scripted_messages,
    RESPONSES: _scripted_response,
    TEXT: _scripted_text,
}


def valid(protocol: str, random: Random) -> Body:
    """A small conversation, or one that a client had, and some of the fields that a protocol has."""
    echoes = _echoes(protocol)
    body = (
        copy.deepcopy(random.choice(echoes)) if echoes and random.random() < 0.4 else _VALID[protocol](random)
    )
    form = random.choice(_FORMS[protocol]) if random.random() < 0.3 else {}
    return body | form | {"stream": random.random() < 0.5, _LIMITS[protocol]: random.randint(1, 24)}


@functools.cache
def _echoes(protocol: str) -> Sequence[Body]:
    """Requests of real clients, without their tools, which stand beside them in the files."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(_ECHOES.glob("*.json"))]
    return [
        {**exchange["request"], "tools": file["tools"]}
        for file in files
        if file["protocol"] == protocol
        for exchange in file["exchanges"]
    ]


def _words(random: Random) -> str:
    return " ".join(random.choice("how deep is the sea where no light falls".split()) for _ in range(6))


def _chat(random: Random) -> Body:
    call = {"id": "call1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}
    turns = [
        {"role": "user", "content": _words(random)},
        {"role": "assistant", "content": _words(random), "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call1", "content": _words(random)},
        {"role": "assistant", "content": _words(random)},
        {"role": "user", "content": [{"type": "text", "text": _words(random)}]},
    ]
    system = [{"role": "system", "content": "Be brief."}] if random.random() < 0.5 else []
    return {"model": "any", "messages": system + turns[: random.choice((1, 3, 5))], "tools": TOOLS}


def _messages(random: Random) -> Body:
    call = {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "a"}}
    reasoning = {"type": "thinking", "thinking": "Hm.", "signature": "AbCd"}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": _words(random)}
    turns = [
        {"role": "user", "content": _words(random)},
        {"role": "assistant", "content": [reasoning, {"type": "text", "text": "So."}, call]},
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": _words(random)},
        {"role": "user", "content": [{"type": "text", "text": _words(random)}]},
    ]
    return {
        "model": "claude-x",
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": turns[: random.choice((1, 3, 5))],
        "tools": [_anthropic(tool) for tool in TOOLS],
        "metadata": {"user_id": "somebody"},
    }


def _response(random: Random) -> Body:
    call = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": '{"path": "a"}'}
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": _words(random)}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "AbCd"},
        call,
        {"type": "function_call_output", "call_id": "c1", "output": _words(random)},
        {"role": "user", "content": _words(random)},
    ]
    return {
        "model": "any",
        "input": items[: random.choice((1, 4, 5))],
        "instructions": "Be brief.",
        "tools": [{"type": "function", **tool["function"]} for tool in TOOLS],
        "reasoning": {"summary": "auto"},
        "include": ["reasoning.encrypted_content"],
    }


def _text(random: Random) -> Body:
    prompt = _words(random) if random.random() < 0.5 else [random.randrange(900) for _ in range(20)]
    return {"model": "any", "prompt": prompt, "logprobs": random.randint(0, 3)}


def _anthropic(tool: Body) -> Body:
    function = tool["function"]
    return {"name": function["name"], "description": "What for.", "input_schema": function["parameters"]}


def _download(random: Random) -> Body:
    """Of a repository that is nowhere: no test asks the hub."""
    return {"repo_id": f"nobody/{random.choice(('deep', 'sea', 'light'))}"}


_VALID: dict[str, Callable[[Random], Body]] = {
    CHAT: _chat,
    TEXT: _text,
    MESSAGES: _messages,
    RESPONSES: _response,
    DOWNLOAD: _download,
}
_LIMITS = {CHAT: "max_tokens", TEXT: "max_tokens", MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}
_LIMITS |= {DOWNLOAD: "unknown"}

_SCHEMA = {
    "type": "object",
    "properties": {"depth": {"type": "integer", "minimum": 0}, "where": {"enum": ["sea", "land"]}},
    "required": ["depth"],
    "additionalProperties": False,
}
_ONE_CALL = {"parallel_tool_calls": False}
_FORMS: dict[str, Sequence[Body]] = {
    CHAT: (
        {"tool_choice": "required", **_ONE_CALL},
        {"tool_choice": {"type": "function", "function": {"name": "read"}}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "deep", "schema": _SCHEMA}}},
    ),
    DOWNLOAD: ({},),
    TEXT: ({},),
    MESSAGES: (
        {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        {"tool_choice": {"type": "tool", "name": "read"}},
        {"output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}}},
    ),
    RESPONSES: (
        {"tool_choice": "required", **_ONE_CALL},
        {"tool_choice": {"type": "function", "name": "read"}},
        {"text": {"format": {"type": "json_object"}}},
        {"text": {"format": {"type": "json_schema", "name": "deep", "schema": _SCHEMA}}},
    ),
}
"""Of a reply, that a request demands."""
