"""Implements POST /v1/chat/completions."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from start_llm.core.chat import ChatRequest, Json, JsonAnswer, OutputConstraint, tool_names
from start_llm.core.events import (
    CallArguments,
    CallEnded,
    CallStarted,
    Content,
    Finished,
    Output,
    Prefilling,
    Reasoning,
)
from start_llm.core.prompt_report import Divergence
from start_llm.protocols.base import (
    FrameTemplate,
    ParsedRequest,
    RequestContext,
    SSEFrame,
    new_id,
)
from start_llm.protocols.constraints import (
    answered_elsewhere,
    demanded_tool,
    read_answer,
    read_form,
    tools_elsewhere,
)
from start_llm.protocols.custom_tools import CustomInput, custom_input
from start_llm.protocols.effort import read_template_options, read_thinking
from start_llm.protocols.fields import Fields
from start_llm.protocols.generation_fields import (
    COMPLETION_LIMITS,
    FORMS_ELSEWHERE,
    GRAMMARS_ELSEWHERE,
    TOP_LOGPROBS,
    UNSUPPORTED_FIELDS,
    read_generation,
    read_limit,
    read_stream,
    refuse_demands,
    refuse_unsupported,
)
from start_llm.protocols.image_parts import ImageParser
from start_llm.protocols.logprobs import chat_logprobs
from start_llm.protocols.openai.chat_input import (
    OWN_TYPES,
    continues_reply,
    read_custom_tools,
    read_messages,
    read_tools,
)
from start_llm.protocols.openai.completion_reply import CompletionReply
from start_llm.protocols.receipts import wants_receipt
from start_llm.protocols.sessions import conversation_id, lineage, session_id
from start_llm.protocols.urgency import service_tier

_INSTEAD = {
    "functions": "tools",
    "function_call": "tool_choice",
    **dict.fromkeys(FORMS_ELSEWHERE, "response_format with a schema"),
    **dict.fromkeys(GRAMMARS_ELSEWHERE, "tools with a custom tool that has a grammar"),
}
"""Fields of other servers and of earlier clients that demand something, and what to send in place of them."""


def _refuse_demands(body: Fields) -> None:
    """Refuse demands that would have no effect: the reply would be free text.

    Raises:
        InvalidRequest: names the field, and what to send.
    """
    forbids_nothing = not body.value("tools") or body.value("tool_choice") == "none"
    is_harmless = body.value("function_call") in (("auto", "none") if forbids_nothing else ("auto",))
    refuse_demands(body, _INSTEAD, harmless=("function_call",) if is_harmless else ())


def parse(body: Fields, headers: Mapping[str, str], context: RequestContext) -> ParsedRequest:
    """Parse a chat completion request. Transport-only fields are dropped here."""
    model = context.model
    refuse_unsupported(body, UNSUPPORTED_FIELDS)
    _refuse_demands(body)
    stream, include_usage = read_stream(body)
    top_logprobs = body.integer("top_logprobs", TOP_LOGPROBS) or 0
    wants_logprobs = body.boolean("logprobs")
    tools, late_tools = read_tools(body)
    custom_tools = read_custom_tools(body)
    names = tool_names((*tools, *late_tools))
    elsewhere = tools_elsewhere(body, names, lambda tool: tool.value("type") not in OWN_TYPES)
    images = ImageParser(context.model.images, context.tenant)
    messages = read_messages(body, images)
    request = ChatRequest(
        messages=messages,
        continues_reply=continues_reply(body, messages),
        images=images.images,
        tools=tools,
        late_tools=late_tools,
        grammars=tuple(grammar for grammar in custom_tools.values() if grammar),
        form=_read_form(body, names, custom_tools, elsewhere),
        thinking=read_thinking(body),
        template_options=read_template_options(body),
        options=read_generation(
            body,
            max_tokens=read_limit(body, *COMPLETION_LIMITS),
            vocabulary=model.card.vocabulary,
            top_logprobs=top_logprobs if wants_logprobs else None,
        ),
        session_id=session_id(body, headers),
        conversation_id=conversation_id(body, headers),
        lineage=lineage(body),
    )
    reply = ChatReply(
        requested_model=body.text("model") or model.card.id,
        model=model,
        include_usage=include_usage,
        with_token_ids=body.boolean("return_token_ids"),
        with_receipt=wants_receipt(body, headers),
        with_progress=body.boolean("return_progress"),
        with_logprobs=wants_logprobs,
        service_tier=service_tier(body, headers),
        custom_tools=frozenset(custom_tools),
    )
    demanded = demanded_tool(body, names, elsewhere)
    return answered_elsewhere(ParsedRequest(request, reply, stream), demanded, context)


def _read_form(
    body: Fields, names: Collection[str], custom_tools: Collection[str], elsewhere: Collection[str]
) -> OutputConstraint:
    guided = body.object("guided_json")  # vLLM's name for the schema of an answer
    answer = read_answer(body.object("response_format"), nested="json_schema")
    if answer is None and guided is not None:
        answer = JsonAnswer(schema=guided.data, field=guided.path)
    return read_form(
        body,
        names,
        answer=answer,
        name_of=partial(_chosen_name, custom_tools),
        elsewhere=elsewhere,
    )


def _chosen_name(custom_tools: Collection[str], tool: Fields) -> str | None:
    kind = tool.required_text("type")
    chosen = tool.object(kind) if kind in ("function", "custom") else None
    if chosen is None:
        return None
    name = chosen.required_text("name")
    return name if kind == "function" or name in custom_tools else None


@dataclass(slots=True)
class CustomCall:
    """A call of a custom tool that is being written."""

    index: int
    input: CustomInput = field(default_factory=CustomInput)


class ContentText:
    """The content of a message, which cannot say where a call stood: a text behind one begins a new line."""

    def __init__(self) -> None:
        self._has_text = self._follows_call = False

    def placed(self, event: Output) -> Output:
        """Return an event of the reply, in its order, with a line break in front of such a text."""
        match event:
            case CallStarted():
                self._follows_call = self._has_text
            case Content(text=text) if text:
                follows_call, self._follows_call, self._has_text = self._follows_call, False, True
                return replace(event, text=f"\n{text}") if follows_call else event
            case _:
                pass
        return event


@dataclass(slots=True)
class ChatReply(CompletionReply):
    """Encodes one chat completion.

    Attributes:
        custom_tools: the names of the tools whose calls have a text instead of arguments.
    """

    custom_tools: Collection[str] = ()
    id: str = field(default_factory=lambda: new_id("chatcmpl-"))
    _frame_templates: Mapping[type[Output], FrameTemplate] = field(init=False)
    _custom_call: CustomCall | None = None
    _owes_role: bool = False
    _content: ContentText = field(default_factory=ContentText)

    def __post_init__(self) -> None:
        self._frame_templates = {
            Content: FrameTemplate(lambda text: self._data({"content": text})),
            Reasoning: FrameTemplate(lambda text: self._data({"reasoning_content": text})),
        }

    def opening(
        self,
        prompt_tokens: int,  # noqa: ARG002 - reported at the end
        divergence: Divergence | None = None,  # noqa: ARG002 - no client can ask for it
    ) -> Iterable[SSEFrame]:
        """Return nothing: programs take the first chunk, which names the role, for the first token."""
        self._owes_role, self._content = True, ContentText()
        return ()

    def _role(self) -> list[SSEFrame]:
        """Return the chunk that names the role, if it has not been sent."""
        if not self._owes_role:
            return []
        self._owes_role = False
        return [self._chunk({"role": "assistant", "content": ""})]

    def keep_alive(self) -> SSEFrame:
        # An empty delta is dropped by proxies, LiteLLM among them (lesson 36).
        role = self._role()
        return role[0] if role else self._chunk({"annotations": []})

    def progress(self, event: Prefilling) -> Iterable[SSEFrame]:
        return self.progress_frames("chat.completion.chunk", _choice({}), event)

    def output(self, event: Output) -> Iterable[SSEFrame]:
        frames = self._frames(self._content.placed(event))
        return [*self._role(), *frames] if frames else frames

    def _frames(self, event: Output) -> list[SSEFrame]:
        if isinstance(event, Content | Reasoning) and not (self.with_token_ids or self.with_logprobs):
            return [self._frame_templates[type(event)].frame(event.text)] if event.text else []
        custom = self._custom_delta(event)
        delta = self._delta(event) if custom is None else custom
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

    def _custom_delta(self, event: Output) -> dict[str, Json] | None:
        """Return the message delta of an event of a custom call; None for all other events."""
        match event:
            case CallStarted(index, name, call_id) if name in self.custom_tools:
                self._custom_call = CustomCall(index)
                custom: Json = {"name": name, "input": ""}
                head: dict[str, Json] = {"index": index, "id": f"call{call_id}", "type": "custom"}
                return {"tool_calls": [{**head, "custom": custom}]}
            case CallArguments(text=text) if self._custom_call:
                return _custom_text(self._custom_call, self._custom_call.input.feed(text))
            case CallEnded() if self._custom_call:
                return self._end_custom_call()
            case _:
                return None

    def _end_custom_call(self) -> dict[str, Json]:
        """Return the message delta with the rest of the open custom call, if one is open."""
        call, self._custom_call = self._custom_call, None
        return _custom_text(call, call.input.finish()) if call else {}

    def _details(self, events: list[Output]) -> dict[str, Json]:
        """Return the requested token ids and log-probabilities of every token, including markup."""
        details = self.token_ids(events)
        if self.with_logprobs:
            entries = (entry for event in events for entry in event.logprobs)
            details["logprobs"] = chat_logprobs(entries, self.model.token_bytes)
        return details

    def closing(self, end: Finished) -> Iterable[SSEFrame]:
        yield from self._role()
        rest = self._end_custom_call()
        if rest:
            yield self._chunk(rest)
        yield from self.closing_frames("chat.completion.chunk", _choice({}, end.reason), end)

    def whole(self, events: list[Output], end: Finished) -> Mapping[str, Json]:
        choice: dict[str, Json] = {
            "index": 0,
            "message": self._message(events),
            "finish_reason": end.reason,
            "logprobs": None,
            **self._details(events),
        }
        return {**self.head("chat.completion"), "choices": [choice], "usage": self.usage(end)}

    def _message(self, events: list[Output]) -> dict[str, Json]:
        placed = map(ContentText().placed, events)
        message: dict[str, Json] = {
            "role": "assistant",
            "content": "".join(event.text for event in placed if isinstance(event, Content)),
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
        arguments = "".join(fragments)
        if start.name in self.custom_tools:
            custom: Json = {"name": start.name, "input": custom_input(arguments)}
            return {"id": f"call{start.id}", "type": "custom", "custom": custom}
        function: Json = {"name": start.name, "arguments": arguments}
        return {"id": f"call{start.id}", "type": "function", "function": function}

    def _chunk(self, delta: dict[str, Json], **more: Json) -> SSEFrame:
        return SSEFrame(self._data(delta, **more))

    def _data(self, delta: dict[str, Json], **more: Json) -> Mapping[str, Json]:
        choices: list[Json] = [_choice(delta, **more)]
        return {**self.head("chat.completion.chunk"), "choices": choices}


def _custom_text(call: CustomCall, text: str) -> dict[str, Json]:
    return {"tool_calls": [{"index": call.index, "custom": {"input": text}}]} if text else {}


def _choice(delta: dict[str, Json], finish_reason: str | None = None, /, **more: Json) -> dict[str, Json]:
    return {"index": 0, "delta": delta, "finish_reason": finish_reason, **more}
