"""Implements POST /v1/messages and /v1/messages/count_tokens.

A demand for a tool that Anthropic runs is answered as unavailable: the model would invent its results.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from start_llm.core.chat import ChatRequest, Json, Message, ToolSchemas, tool_names
from start_llm.core.errors import InvalidRequest
from start_llm.core.events import Finished, FinishReason, Output, Prefilling, Usage
from start_llm.core.ids import name_in
from start_llm.core.prompt_report import Divergence, Receipt
from start_llm.core.sampling import Range
from start_llm.protocols.anthropic.content_blocks import (
    BlockGrew,
    BlockStarted,
    BlockStopped,
    BlockWriter,
    Member,
    Step,
    whole_blocks,
)
from start_llm.protocols.anthropic.error_bodies import anthropic_error, refuse_image
from start_llm.protocols.anthropic.messages_input import read_conversation, read_form, read_tools
from start_llm.protocols.base import (
    FrameTemplate,
    ParsedRequest,
    RequestContext,
    SSEFrame,
    json_text,
    new_id,
)
from start_llm.protocols.content import begins_reply
from start_llm.protocols.effort import read_template_options, read_thinking
from start_llm.protocols.fields import Fields
from start_llm.protocols.generation_fields import NO_LIMIT, TOKEN_COUNT, read_generation
from start_llm.protocols.image_parts import ImageParser
from start_llm.protocols.receipts import receipt_json, wants_receipt
from start_llm.protocols.sessions import conversation_id, lineage, session_id
from start_llm.protocols.tool_types import anthropic_tool_type, unavailable_text

VENDOR = "Anthropic"
_SEARCH = "web_search"
_LONGEST_QUERY = 400


def demanded_tool(body: Fields, tools: ToolSchemas) -> str | None:
    """Return the name of a tool that must be called and that Anthropic runs; None without such a demand."""
    choice, elsewhere = body.object("tool_choice"), _tools_elsewhere(body)
    kind = choice.text("type") if choice else None
    if choice and kind == "tool":
        name = choice.text("name")
        return name if name in elsewhere and name not in tool_names(tools) else None
    return elsewhere[0] if kind == "any" and elsewhere and not tools else None


def _tools_elsewhere(body: Fields) -> list[str]:
    kinds = ((tool, tool.text("type")) for tool in body.objects("tools"))
    vendors = (tool for tool, kind in kinds if kind and anthropic_tool_type(kind).runs == "vendor")
    return [name for name in (tool.value("name") for tool in vendors) if isinstance(name, str)]


def unavailable_blocks(name: str, messages: Sequence[Message]) -> list[dict[str, Json]]:
    """Return the blocks of a search that failed, as Anthropic's API tells it; none for other tools."""
    if name != _SEARCH:
        return []
    used, asked = new_id("srvtoolu_"), messages[-1].content[:_LONGEST_QUERY]
    error: Json = {"type": "web_search_tool_result_error", "error_code": "unavailable"}
    return [
        {"type": "server_tool_use", "id": used, "name": name, "input": {"query": asked}},
        {"type": "web_search_tool_result", "tool_use_id": used, "content": error},
    ]


def with_notice(body: Fields, tools: ToolSchemas, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Tell the model that the tools are not there, if the request has no others and relies on them."""
    elsewhere = _tools_elsewhere(body)
    if tools or not elsewhere:
        return messages
    notice = "\n".join(unavailable_text(name, VENDOR) for name in elsewhere)
    first, *rest = messages
    if first.role != "system":
        return (Message(role="system", content=notice), *messages)
    return (replace(first, content=f"{first.content}\n\n{notice}"), *rest)


_COUNT_OR_NONE = Range(NO_LIMIT, TOKEN_COUNT.high)
_STOP_REASONS: Mapping[FinishReason, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}
_COUNTED = ("model", "system", "tools", "messages")
"""Places of a divergence for which the reason says how many tokens were missed."""
_MISS_REASONS = {
    **{place: f"{place}_changed" for place in _COUNTED},
    "other": "unavailable",
    "unknown": "previous_message_not_found",
}
"""`CacheMissReason` of anthropic 2.14, by the place of the divergence."""
_HOUR_S = 3600
_TIER = "standard"
"""The one of Anthropic's tiers in which a request is served: none is bought, and none is a batch."""
_DELTAS: Mapping[Member, tuple[str, str]] = {
    "thinking": ("thinking_delta", "thinking"),
    "signature": ("signature_delta", "signature"),
    "text": ("text_delta", "text"),
    "input": ("input_json_delta", "partial_json"),
}
"""For each member of a block: the type of its delta, and the name of the text in the delta."""


def parse(body: Fields, headers: Mapping[str, str], context: RequestContext) -> ParsedRequest:
    """Parse a request for a message. Transport-only fields are dropped here."""
    return _parse(body, headers, context, limit=_limit(body))


def parse_count(body: Fields, headers: Mapping[str, str], context: RequestContext) -> ParsedRequest:
    """Parse a request to count the tokens of a prompt. `max_tokens` is not needed."""
    return _parse(body, headers, context, limit=0)


def count_json(tokens: int) -> dict[str, Json]:
    """Return the reply of count_tokens."""
    return {"input_tokens": tokens}


def _limit(body: Fields) -> int:
    """Return the limit, or NO_LIMIT. 0 means: read the prompt into the cache, and generate nothing."""
    limit = body.integer("max_tokens", _COUNT_OR_NONE)
    if limit is None:
        raise InvalidRequest("max_tokens: Field required", param="max_tokens")
    return limit


def _parse(body: Fields, headers: Mapping[str, str], context: RequestContext, *, limit: int) -> ParsedRequest:
    tools, late_tools = read_tools(body)
    demanded = demanded_tool(body, (*tools, *late_tools))
    images = ImageParser(context.model.images, context.tenant, refuse=refuse_image)
    messages = read_conversation(body, partial(context.seal.open, tenant=context.tenant), images)
    diagnostics = body.object("diagnostics")
    previous = diagnostics.text("previous_message_id") if diagnostics else None
    request = ChatRequest(
        messages=with_notice(body, (*tools, *late_tools), messages),
        continues_reply=begins_reply(messages),
        images=images.images,
        tools=tools,
        late_tools=late_tools,
        form=read_form(body, (*tools, *late_tools), runs_elsewhere=demanded is not None),
        thinking=read_thinking(body),
        template_options=read_template_options(body),
        options=read_generation(
            body,
            max_tokens=None if limit == NO_LIMIT else limit,
            stop="stop_sequences",
            vocabulary=context.model.card.vocabulary,
        ),
        session_id=session_id(body, headers),
        conversation_id=conversation_id(body, headers),
        lineage=lineage(body),
        compared_with=None if previous is None else name_in(previous),
    )
    reply = MessagesReply(
        requested_model=body.text("model") or context.model.card.id,
        seal=partial(context.seal.seal, tenant=context.tenant),
        shows_reasoning=_shows_reasoning(body),
        with_receipt=wants_receipt(body, headers),
        with_diagnostics=diagnostics is not None,
    )
    parsed = ParsedRequest(request, reply, body.boolean("stream"))
    if demanded is None or request.options.is_prewarm:
        return parsed
    context.notices.tell(f"The tool {demanded!r} runs on Anthropic's servers: it is answered as unavailable.")
    reply.unavailable = unavailable_blocks(demanded, messages)
    return replace(parsed, unavailable=unavailable_text(demanded, VENDOR))


def _shows_reasoning(body: Fields) -> bool:
    """Return False if the client omits reasoning text; it then sends reasoning back by its signature."""
    thinking = body.value("thinking")
    return not (isinstance(thinking, dict) and Fields(thinking, "thinking").text("display") == "omitted")


@dataclass(slots=True)
class MessagesReply:
    """Encodes one message.

    Attributes:
        seal: creates the signature of reasoning, which contains the reply's name.
        with_receipt: usage at the end has a receipt.
        with_diagnostics: say where the prompt leaves an earlier one, if it does.
        shows_reasoning: send the text of reasoning, not only its signature.
        unavailable: blocks at the beginning about a tool of Anthropic's that is not there.
    """

    requested_model: str
    seal: Callable[[str, str], str]
    shows_reasoning: bool = True
    with_receipt: bool = False
    with_diagnostics: bool = False
    unavailable: Sequence[Mapping[str, Json]] = ()
    id: str = field(default_factory=lambda: new_id("msg_"))
    _writer: BlockWriter = field(init=False)
    _blocks: int = 0
    _frame_templates: dict[Member, FrameTemplate] = field(default_factory=dict[Member, FrameTemplate])

    def __post_init__(self) -> None:
        self._writer = self._new_writer()

    def opening(self, prompt_tokens: int, divergence: Divergence | None = None) -> Iterable[SSEFrame]:
        """Send the prompt's length: some clients read it here and ignore the final usage."""
        counts: dict[str, Json] = {
            **_usage(Usage(prompt_tokens, cached=0, completion=0), Receipt()),
            "service_tier": _TIER,
        }
        message = self._message([], None, None, counts, divergence)
        yield _frame("message_start", message=message)
        for block in self.unavailable:
            yield from self._whole_block(block)

    def keep_alive(self) -> SSEFrame:
        return _frame("ping")

    def progress(self, event: Prefilling) -> Iterable[SSEFrame]:  # noqa: ARG002 - `ping` says nothing else
        return ()

    def output(self, event: Output) -> Iterable[SSEFrame]:
        yield from map(self._step, self._writer.feed(event))

    def closing(self, end: Finished) -> Iterable[SSEFrame]:
        yield from map(self._step, self._writer.close())
        reason, sequence = _stopped(end)
        delta: Json = {"stop_reason": reason, "stop_sequence": sequence}
        yield _frame("message_delta", delta=delta, usage=self._counts(end))
        yield _frame("message_stop")

    def failure(self, message: str) -> SSEFrame:
        return SSEFrame(anthropic_error(message, status=500, request_id=self.id), event="error")

    def whole(self, events: list[Output], end: Finished) -> Mapping[str, Json]:
        blocks = whole_blocks(_steps(self._new_writer(), events))
        first: list[Json] = [dict(block) for block in self.unavailable]
        counts = {**self._counts(end), "service_tier": _TIER}
        return self._message([*first, *blocks], *_stopped(end), counts, end.divergence)

    def _counts(self, end: Finished) -> dict[str, Json]:
        counts = _usage(end.usage, end.receipt)
        return {**counts, "receipt": receipt_json(end.receipt)} if self.with_receipt else counts

    def _whole_block(self, block: Mapping[str, Json]) -> Iterator[SSEFrame]:
        """Yield the events of a block that is known as a whole. The input of a call comes in a delta."""
        arguments = block.get("input")
        yield self._step(BlockStarted(dict(block) if arguments is None else {**block, "input": {}}))
        if isinstance(arguments, dict):
            yield self._step(BlockGrew("input", json_text(arguments)))
        yield self._step(BlockStopped())

    def _new_writer(self) -> BlockWriter:
        def signed(reasoning: str) -> str:
            return self.seal(reasoning, name_in(self.id))

        return BlockWriter(signed, shows_reasoning=self.shows_reasoning)

    def _message(
        self,
        content: list[Json],
        reason: str | None,
        sequence: str | None,
        usage: Json,
        divergence: Divergence | None,
    ) -> dict[str, Json]:
        message: dict[str, Json] = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.requested_model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage,
        }
        return {**message, "diagnostics": _diagnostics(divergence)} if self.with_diagnostics else message

    def _step(self, step: Step) -> SSEFrame:
        match step:
            case BlockStarted(block):
                self._blocks += 1
                self._frame_templates.clear()
                return self._block_frame("content_block_start", content_block=block)
            case BlockGrew(member, text):
                return self._frame_template(member).frame(text)
            case BlockStopped():
                return self._block_frame("content_block_stop")

    def _frame_template(self, member: Member) -> FrameTemplate:
        """Return the frame template for the growth of a member of the open block."""
        if member not in self._frame_templates:
            kind, name = _DELTAS[member]
            event: dict[str, Json] = {"type": "content_block_delta", "index": self._blocks - 1}
            self._frame_templates[member] = FrameTemplate(
                lambda text: {**event, "delta": {"type": kind, name: text}}, "content_block_delta"
            )
        return self._frame_templates[member]

    def _block_frame(self, kind: str, **members: Json) -> SSEFrame:
        return _frame(kind, index=self._blocks - 1, **members)


def _steps(writer: BlockWriter, events: list[Output]) -> Iterator[Step]:
    for event in events:
        yield from writer.feed(event)
    yield from writer.close()


def _frame(kind: str, **members: Json) -> SSEFrame:
    return SSEFrame({"type": kind, **members}, event=kind)


def _stopped(end: Finished) -> tuple[str, str | None]:
    """Return `stop_reason` and `stop_sequence`."""
    if end.reason == "stop" and end.stop is not None:
        return "stop_sequence", end.stop
    return _STOP_REASONS[end.reason], None


def _written(receipt: Receipt) -> dict[str, int]:
    """Return the tokens that were computed up to the places that a request marks, by how long they stay."""
    written = {"5m": 0, "1h": 0}
    done = receipt.from_memory + receipt.from_disk
    for place in sorted(receipt.kept) if receipt.is_kept else ():
        end = min(place.tokens, receipt.prompt - receipt.unread)
        written["1h" if place.seconds >= _HOUR_S else "5m"] += max(end - done, 0)
        done = max(done, end)
    return written


def _diagnostics(divergence: Divergence | None) -> Json:
    """Return why the prompt cache could not go on from the earlier request; None if it could."""
    if divergence is None:
        return None
    reason: dict[str, Json] = {"type": _MISS_REASONS[divergence.place]}
    if divergence.place in _COUNTED:
        reason["cache_missed_input_tokens"] = divergence.missed
    return {"cache_miss_reason": reason}


def _usage(usage: Usage, receipt: Receipt) -> dict[str, Json]:
    """Return the real counts. The first three sum to the prompt.

    Tokens that were computed are `cache_creation_input_tokens` up to the last place that the request marks,
    and `input_tokens` behind it.
    """
    written = _written(receipt)
    created = sum(written.values())
    return {
        "input_tokens": usage.prompt - usage.cached - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": usage.cached,
        "cache_creation": {f"ephemeral_{ttl}_input_tokens": tokens for ttl, tokens in written.items()},
        "output_tokens": usage.completion,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
    }
