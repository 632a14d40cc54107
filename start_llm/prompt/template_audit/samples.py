"""Renders sample conversations, in which others look for the marks of a model's text."""

from collections.abc import Iterator, Mapping

from start_llm.core.chat import Json
from start_llm.core.errors import InvalidRequest
from start_llm.prompt.template import Rendering, TemplateMessage, TemplateTokenizer

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
_REASONING: TemplateMessage = dict.fromkeys(("reasoning_content", "thinking", "reasoning"), "samplethought")
_SYSTEM: TemplateMessage = {"role": "system", "content": "samplesystem"}
_USER: TemplateMessage = {"role": "user", "content": "samplequestion"}
_SWITCHED: tuple[Mapping[str, Json], ...] = (
    {},
    *({option: on} for option in ("enable_thinking", "thinking") for on in (True, False)),
)


def rendered_samples(tokenizer: TemplateTokenizer) -> str:
    """Return renderings of tools, reasoning, all forms of calls, and generation prompts.

    Generation prompts come with reasoning on and off. Templates refuse some samples, and some compose their
    marks only while they render.
    """
    return "\n".join(_renderings(tokenizer)) if tokenizer.has_chat_template else ""


def _renderings(tokenizer: TemplateTokenizer) -> Iterator[str]:
    asked = [_SYSTEM, _USER]
    for options in _SWITCHED:
        yield _rendered(tokenizer, asked, options)
    for messages in (asked, [_USER]):
        yield _rendered(
            tokenizer, [*messages, {"role": "assistant", "content": "sampleanswer", **_REASONING}], {}
        )
        for call_id in _CALL_IDS:
            for arguments in _ARGUMENTS:
                yield _rendered(tokenizer, [*messages, *_called(call_id, arguments)], {})


def _called(call_id: str, arguments: Json) -> list[TemplateMessage]:
    function: Json = {"name": "sampletool", "arguments": arguments}
    call: Json = {"id": call_id, "type": "function", "function": function}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call], **_REASONING},
        {"role": "tool", "content": "sampleresult", "tool_call_id": call_id, "name": "sampletool"},
    ]


def _rendered(
    tokenizer: TemplateTokenizer, messages: list[TemplateMessage], options: Mapping[str, Json]
) -> str:
    rendering = Rendering(tokenizer, (_TOOL,), options, lambda form: form)
    try:
        return rendering.text(messages, add_generation_prompt=messages[-1]["role"] != "assistant")
    except InvalidRequest:
        return ""
