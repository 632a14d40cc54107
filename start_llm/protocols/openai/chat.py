"""Implements POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from start_llm.core.chat import ChatRequest, Json, JsonAnswer, OutputConstraint
from start_llm.core.events import (
    CallArguments,
    CallEnded,
    CallStarted,
    Content,
    Finished,
    Output,
    Reasoning,
)
from start_llm.core.sampling import Range
from start_llm.protocols.base import (
    FrameTemplate,
    ModelFacts,
    ParsedRequest,
    RequestContext,
    SSEFrame,
    new_id,
    openai_error,
)
from start_llm.protocols.effort import read_thinking
from start_llm.protocols.fields import Fields
from start_llm.protocols.images import ImageParser
from start_llm.protocols.logprobs import chat_logprobs
from start_llm.protocols.openai.constraints import read_answer, read_form
from start_llm.protocols.openai.messages import (
    ToolSchemas,
    continues_reply,
    read_messages,
    read_tools,
    tool_names,
)
from start_llm.protocols.openai.options import (
    UNSUPPORTED_FIELDS,
    read_options,
    read_stream,
    refuse_unsupported,
)
from start_llm.protocols.openai.usage import closing_frames, usage_json
from start_llm.protocols.sessions import conversation_id, lineage, session_id
from start_llm.protocols.template_options import read_template_options

_TOP_LOGPROBS = Range(0, 20)


def parse(body: Fields, headers: Mapping[str, str], context: RequestContext) -> ParsedRequest:
    """Parse a chat completion request. Transport-only fields are dropped here."""
    model = context.model
    refuse_unsupported(body, UNSUPPORTED_FIELDS)
    stream, include_usage = read_stream(body)
    top_logprobs = body.integer("top_logprobs", _TOP_LOGPROBS) or 0
    wants_logprobs = body.boolean("logprobs")
    tools, late_tools = read_tools(body)
    images = ImageParser(context.model.images, context.tenant)
    messages = read_messages(body, images)
    request = ChatRequest(
        messages=messages,
        continues_reply=continues_reply(body, messages),
        images=images.images,
        tools=tools,
        late_tools=late_tools,
        form=_read_form(body, (*tools, *late_tools)),
        thinking=read_thinking(body),
        template_options=read_template_options(body),
        options=read_options(
            body, vocabulary=model.vocabulary, top_logprobs=top_logprobs if wants_logprobs else None
        ),
        session_id=session_id(body, headers),
        conversation_id=conversation_id(body, headers),
        lineage=lineage(body),
    )
    reply = ChatReply(
        requested_model=body.text("model") or model.id,
        model=model,
        include_usage=include_usage,
        with_token_ids=body.boolean("return_token_ids"),
        with_logprobs=wants_logprobs,
    )
    return ParsedRequest(request, reply, stream)


def _read_form(body: Fields, tools: ToolSchemas) -> OutputConstraint:
    guided = body.object("guided_json")  # vLLM's name for the schema of an answer
    answer = read_answer(body.object("response_format"), nested="json_schema")
    if answer is None and guided is not None:
        answer = JsonAnswer(schema=guided.data, field=guided.path)
    return read_form(body, tool_names(tools), answer=answer, name_of=_chosen_name)


def _chosen_name(tool: Fields) -> str | None:
    function = tool.object("function")
    if tool.required_text("type") != "function" or function is None:
        return None
    return function.required_text("name")


@dataclass(slots=True)
class ChatReply:
    """Encodes one chat completion."""

    requested_model: str
    model: ModelFacts
    include_usage: bool
    with_token_ids: bool
    with_logprobs: bool
    id: str = field(default_factory=lambda: new_id("chatcmpl-"))
    created: int = field(default_factory=lambda: int(time.time()))
    _frame_templates: Mapping[type[Output], FrameTemplate] = field(init=False)

    def __post_init__(self) -> None:
        self._frame_templates = {
            Content: FrameTemplate(lambda text: self._data({"content": text})),
            Reasoning: FrameTemplate(lambda text: self._data({"reasoning_content": text})),
        }

    def opening(self, prompt_tokens: int) -> Iterable[SSEFrame]:  # noqa: ARG002 - told at the end
        yield self._chunk({"role": "assistant", "content": ""})

    def keep_alive(self) -> SSEFrame:
        # LiteLLM drops chunks whose delta is empty (lesson 36).
        return self._chunk({"annotations": []})

    def output(self, event: Output) -> Iterable[SSEFrame]:
        if isinstance(event, Content | Reasoning) and not (self.with_token_ids or self.with_logprobs):
            return [self._frame_templates[type(event)].frame(event.text)] if event.text else []
        delta = self._delta(event)
        more = self._details([event])
        return [self._chunk(delta, **more)] if delta or more else []

    def _delta(self, event: Output) -> dict[str, Json]:
        """Return the message delta of an event; empty if the event changes nothing."""
        match event:
            case Content(text):
                return {"content": text} if text else {}
            case Reasoning(text):
                return {"reasoning_content": text}
            case CallStarted(index, name, call_id):
                function: dict[str, Json] = {"name": name, "arguments": ""}
                head: dict[str, Json] = {"index": index, "id": f"call{call_id}", "type": "function"}
                return {"tool_calls": [{**head, "function": function}]}
            case CallArguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
            case CallEnded():
                return {}

    def _details(self, events: list[Output]) -> dict[str, Json]:
        """Return the requested token ids and log-probabilities of every token, including markup."""
        details: dict[str, Json] = {}
        if self.with_token_ids:
            details["token_ids"] = [token for event in events for token in event.tokens]
        if self.with_logprobs:
            entries = (entry for event in events for entry in event.logprobs)
            details["logprobs"] = chat_logprobs(entries, self.model.token_bytes)
        return details

    def closing(self, end: Finished) -> Iterable[SSEFrame]:
        head = self._head("chat.completion.chunk")
        choice = _choice({}, end.reason)
        return closing_frames(head, choice, end.usage, include_usage=self.include_usage)

    def failure(self, message: str) -> SSEFrame:
        return SSEFrame(openai_error(message, kind="server_error"))

    def whole(self, events: list[Output], end: Finished) -> Mapping[str, Json]:
        choice: dict[str, Json] = {
            "index": 0,
            "message": self._message(events),
            "finish_reason": end.reason,
            "logprobs": None,
            **self._details(events),
        }
        return {**self._head("chat.completion"), "choices": [choice], "usage": usage_json(end.usage)}

    def _message(self, events: list[Output]) -> dict[str, Json]:
        message: dict[str, Json] = {
            "role": "assistant",
            "content": "".join(event.text for event in events if isinstance(event, Content)),
            "refusal": None,
        }
        reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
        if reasoning:
            # Clients use either name.
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        calls = [self._call(event, events) for event in events if isinstance(event, CallStarted)]
        return {**message, "tool_calls": calls} if calls else message

    def _call(self, start: CallStarted, events: list[Output]) -> Json:
        fragments = [
            event.text for event in events if isinstance(event, CallArguments) and event.index == start.index
        ]
        function: Json = {"name": start.name, "arguments": "".join(fragments)}
        return {"id": f"call{start.id}", "type": "function", "function": function}

    def _head(self, kind: str) -> dict[str, Json]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.requested_model,
            "system_fingerprint": self.model.id,
        }

    def _chunk(self, delta: dict[str, Json], **more: Json) -> SSEFrame:
        return SSEFrame(self._data(delta, **more))

    def _data(self, delta: dict[str, Json], **more: Json) -> Mapping[str, Json]:
        choices: list[Json] = [_choice(delta, **more)]
        return {**self._head("chat.completion.chunk"), "choices": choices}


def _choice(delta: dict[str, Json], finish_reason: str | None = None, /, **more: Json) -> dict[str, Json]:
    return {"index": 0, "delta": delta, "finish_reason": finish_reason, **more}
