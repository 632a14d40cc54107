"""Conversations as a template renders them, for those who look for the marks of a model's text in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from start_llm.core.chat import Json
from start_llm.core.errors import InvalidRequest
from start_llm.prompt.template import Rendering, Seen, TemplateTokenizer

_TOOL: Mapping[str, Json] = {
    "type": "function",
    "function": {
        "name": "sampletool",
        "description": "sampledescription",
        "parameters": {"type": "object", "properties": {"samplekey": {"type": "string"}}},
    },
}
_ARGUMENTS: tuple[Json, ...] = ({"samplekey": "samplevalue"}, '{"samplekey": "samplevalue"}')
_CALL_IDS = ("call0", "000000000", "functions.sampletool:0")
_THOUGHT: Seen = dict.fromkeys(("reasoning_content", "thinking", "reasoning"), "samplethought")
_SYSTEM: Seen = {"role": "system", "content": "samplesystem"}
_USER: Seen = {"role": "user", "content": "samplequestion"}
_SWITCHED: tuple[Mapping[str, Json], ...] = (
    {},
    *({option: on} for option in ("enable_thinking", "thinking") for on in (True, False)),
)


def rendered_samples(tokenizer: TemplateTokenizer) -> str:
    """Tools, a thought, calls in each form, and what asks for a reply with thinking on and off.

    Templates refuse some of that, and put marks together only where they render them.
    """
    return "\n".join(_renderings(tokenizer)) if tokenizer.has_chat_template else ""


def _renderings(tokenizer: TemplateTokenizer) -> Iterator[str]:
    asked = [_SYSTEM, _USER]
    for options in _SWITCHED:
        yield _rendered(tokenizer, asked, options)
    for messages in (asked, [_USER]):
        yield _rendered(
            tokenizer, [*messages, {"role": "assistant", "content": "sampleanswer", **_THOUGHT}], {}
        )
        for call_id in _CALL_IDS:
            for arguments in _ARGUMENTS:
                yield _rendered(tokenizer, [*messages, *_called(call_id, arguments)], {})


def _called(call_id: str, arguments: Json) -> list[Seen]:
    function: Json = {"name": "sampletool", "arguments": arguments}
    call: Json = {"id": call_id, "type": "function", "function": function}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call], **_THOUGHT},
        {"role": "tool", "content": "sampleresult", "tool_call_id": call_id, "name": "sampletool"},
    ]


def _rendered(tokenizer: TemplateTokenizer, messages: list[Seen], options: Mapping[str, Json]) -> str:
    rendering = Rendering(tokenizer, (_TOOL,), options, lambda form: form)
    try:
        return rendering.text(messages, with_tail=messages[-1]["role"] != "assistant")
    except InvalidRequest:
        return ""
