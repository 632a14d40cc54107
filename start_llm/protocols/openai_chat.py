"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from start_llm.core.chat import ChatRequest, Json, OutputForm
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
from start_llm.protocols.base import Call, Context, Frame, FrameMould, ModelFacts, new_id, openai_error
from start_llm.protocols.effort import read_thinking
from start_llm.protocols.fields import Fields
from start_llm.protocols.logprobs import chat_logprobs
from start_llm.protocols.openai_forms import read_answer, read_form
from start_llm.protocols.openai_messages import ToolSchemas, read_messages, read_tools, tool_names
from start_llm.protocols.openai_options import (
    COMMON_NOT_YET,
    read_options,
    read_stream,
    refuse_unbuilt,
)
from start_llm.protocols.openai_usage import closing_frames, usage_json
from start_llm.protocols.sessions import conversation_id, lineage, session_id
from start_llm.protocols.template_options import read_template_options

_TOP_LOGPROBS = Range(0, 20)


def parse(body: Fields, headers: Mapping[str, str], context: Context) -> Call:
    """A chat completion request. Transport-only fields end here."""
    model = context.model
    refuse_unbuilt(body, COMMON_NOT_YET)
    stream, include_usage = read_stream(body)
    top_logprobs = body.integer("top_logprobs", _TOP_LOGPROBS) or 0
    wants_logprobs = body.boolean("logprobs")
    tools, late_tools = read_tools(body)
    request = ChatRequest(
        messages=read_messages(body),
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
    return Call(request, reply, stream)


def _read_form(body: Fields, tools: ToolSchemas) -> OutputForm:
    answer = read_answer(body.object("response_format"), nested="json_schema")
    return read_form(body, tool_names(tools), answer=answer, name_of=_chosen_name)


def _chosen_name(tool: Fields) -> str | None:
    function = tool.object("function")
    if tool.required_text("type") != "function" or function is None:
        return None
    return function.required_text("name")


@dataclass(slots=True)
class ChatReply:
    """Encoder of one chat completion."""

    requested_model: str
    model: ModelFacts
    include_usage: bool
    with_token_ids: bool
    with_logprobs: bool
    id: str = field(default_factory=lambda: new_id("chatcmpl-"))
    created: int = field(default_factory=lambda: int(time.time()))
    _moulds: Mapping[type[Output], FrameMould] = field(init=False)

    def __post_init__(self) -> None:
        self._moulds = {
            Content: FrameMould(lambda text: self._data({"content": text})),
            Reasoning: FrameMould(lambda text: self._data({"reasoning_content": text})),
        }

    def opening(self, prompt_tokens: int) -> Iterable[Frame]:  # noqa: ARG002 - told at the end
        yield self._chunk({"role": "assistant", "content": ""})

    def keep_alive(self) -> Frame:
        # LiteLLM passes no delta on in which there is nothing at all (lesson 36).
        return self._chunk({"annotations": []})

    def output(self, event: Output) -> Iterable[Frame]:
        if isinstance(event, Content | Reasoning) and not (self.with_token_ids or self.with_logprobs):
            return [self._moulds[type(event)].frame(event.text)] if event.text else []
        delta = self._delta(event)
        more = self._details([event])
        return [self._chunk(delta, **more)] if delta or more else []

    def _delta(self, event: Output) -> dict[str, Json]:
        """The change that an event makes to the message; empty if it makes none."""
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
        """What was asked for beside the text: every token of the reply, markup included."""
        details: dict[str, Json] = {}
        if self.with_token_ids:
            details["token_ids"] = [token for event in events for token in event.tokens]
        if self.with_logprobs:
            entries = (entry for event in events for entry in event.logprobs)
            details["logprobs"] = chat_logprobs(entries, self.model.token_bytes)
        return details

    def closing(self, end: Finished) -> Iterable[Frame]:
        head = self._head("chat.completion.chunk")
        choice = _choice({}, end.reason)
        return closing_frames(head, choice, end.usage, include_usage=self.include_usage)

    def failure(self, message: str) -> Frame:
        return Frame(openai_error(message, kind="server_error"))

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
        thought = "".join(event.text for event in events if isinstance(event, Reasoning))
        if thought:
            # Both names are in use.
            message |= {"reasoning_content": thought, "reasoning": thought}
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

    def _chunk(self, delta: dict[str, Json], **more: Json) -> Frame:
        return Frame(self._data(delta, **more))

    def _data(self, delta: dict[str, Json], **more: Json) -> Mapping[str, Json]:
        choices: list[Json] = [_choice(delta, **more)]
        return {**self._head("chat.completion.chunk"), "choices": choices}


def _choice(delta: dict[str, Json], finish_reason: str | None = None, /, **more: Json) -> dict[str, Json]:
    return {"index": 0, "delta": delta, "finish_reason": finish_reason, **more}
