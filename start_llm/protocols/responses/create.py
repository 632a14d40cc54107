"""Implements POST /v1/responses, and the endpoints of one response."""

import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from start_llm.core.chat import ChatRequest, GenerationOptions, Json, Message, OutputConstraint
from start_llm.core.errors import InvalidRequest, RequestError
from start_llm.core.ids import name_in
from start_llm.protocols.base import ParsedRequest, RequestContext, SSEFrame, new_id, openai_error
from start_llm.protocols.breakpoints import (
    applied_options,
    seconds_of_request,
    with_end_kept,
    with_tools_kept,
)
from start_llm.protocols.constraints import (
    answered_elsewhere,
    demanded_tool,
    read_answer,
    read_form,
    tools_elsewhere,
)
from start_llm.protocols.effort import read_template_options, read_thinking
from start_llm.protocols.fields import Fields
from start_llm.protocols.generation_fields import (
    FORMS_ELSEWHERE,
    FREE_TEXT,
    GRAMMARS_ELSEWHERE,
    TOP_LOGPROBS,
    UNSUPPORTED_FIELDS,
    UnsupportedField,
    read_generation,
    read_limit,
    refuse_demands,
    refuse_unsupported,
)
from start_llm.protocols.image_parts import ImageParser
from start_llm.protocols.receipts import wants_receipt
from start_llm.protocols.response_store import StoredResponse
from start_llm.protocols.responses.input import Item, ItemReader, new_items, with_ids
from start_llm.protocols.responses.response_encoding import ResponseReply
from start_llm.protocols.responses.tools import Toolbox, read_toolbox, runs_elsewhere
from start_llm.protocols.sessions import conversation_id, lineage, session_id
from start_llm.protocols.tool_types import responses_tool_type
from start_llm.protocols.urgency import service_tier

_LIMITS = ("max_output_tokens", "max_completion_tokens", "max_tokens")
_LOGPROBS = "message.output_text.logprobs"
"""The `include` value that requests log-probabilities."""


_NOT_YET = (
    *UNSUPPORTED_FIELDS,
    UnsupportedField("background", False, "must be false: a response is made while its client waits"),
    UnsupportedField("conversation", None, "is not kept on this server; send previous_response_id"),
    UnsupportedField("prompt", None, "names a stored prompt, and this server has none; send input"),
)
_FORMS: tuple[str, ...] = ("response_format", "guided_json", *FORMS_ELSEWHERE)
_INSTEAD = {
    **dict.fromkeys(_FORMS, "text.format"),
    **dict.fromkeys(GRAMMARS_ELSEWHERE, "tools with a custom tool that has a grammar"),
}
_DEEPER = 32
"""Levels around a field of the request inside a response event, plus a margin."""


@dataclass(frozen=True, slots=True)
class _Conversation:
    """The conversation of a request.

    Attributes:
        earlier: items of earlier responses.
        made_items: those of them, and of what its own ones refer to, whose ids this server has made.
        new: its own items.
    """

    earlier: Sequence[Item]
    made_items: Mapping[str, Item]
    new: Sequence[Fields]
    instructions: str | None

    @property
    def items(self) -> list[Item]:
        return [item.data for item in self.fields]

    @property
    def fields(self) -> list[Fields]:
        """All items, each with its path in the request."""
        earlier = [Fields(item, f"previous_response_id[{at}]") for at, item in enumerate(self.earlier)]
        return [*earlier, *self.new]


def parse(body: Fields, headers: Mapping[str, str], context: RequestContext) -> ParsedRequest:
    """Parse a response request. Transport-only fields are dropped here."""
    refuse_unsupported(body, _NOT_YET)
    refuse_demands(body, _INSTEAD)
    _check_unread(body)
    conversation = _read_conversation(body, context)
    toolbox = read_toolbox(body, context.notices.tell)
    elsewhere = tools_elsewhere(body, toolbox.names, runs_elsewhere)
    options = _read_options(body, context)
    images = ImageParser(context.model.images, context.tenant)
    compared_with = _compared_with(body)
    request = ChatRequest(
        messages=_read_messages(body, conversation, toolbox, images, context),
        images=images.images,
        tools=toolbox.schemas,
        grammars=toolbox.grammars,
        form=_read_form(body, toolbox, elsewhere),
        thinking=read_thinking(body),
        template_options=read_template_options(body),
        options=options,
        session_id=session_id(body, headers),
        conversation_id=conversation_id(body, headers),
        lineage=lineage(body),
        compared_with=compared_with,
    )
    reply = ResponseReply(
        repeated=_writable(
            {
                **_repeated(body, context, conversation, options),
                "service_tier": service_tier(body, headers),
            }
        ),
        toolbox=toolbox,
        as_summary=_wants_summary(body),
        sealed=partial(context.seal.seal, tenant=context.tenant),
        token_bytes=context.model.token_bytes,
        keep=partial(_keep, context, conversation, _stores(body, options)),
        with_receipt=wants_receipt(body, headers),
        with_diagnostics=compared_with is not None,
        is_prewarm=options.is_prewarm,
    )
    parsed = ParsedRequest(request, reply, body.boolean("stream"))
    return answered_elsewhere(parsed, demanded_tool(body, toolbox.names, elsewhere), context)


def refusal(error: RequestError) -> dict[str, Json]:
    """Encode an error. An error in the messages is an error in `input`."""
    param = "input" if error.param == "messages" else error.param
    return openai_error(error.message, kind=error.kind, param=param, code=error.code)


def refused_stream(error: RequestError) -> list[SSEFrame]:
    """Encode an error of a stream that began before its request could be read: a response that failed.

    OpenAI's clients expect `response.created` in front of every other event.
    """
    code = error.code or ("server_error" if error.status >= 500 else "invalid_prompt")
    response: dict[str, Json] = {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }
    failed: Json = {**response, "status": "failed", "error": {"code": code, "message": error.message}}
    events: list[tuple[str, Json]] = [("response.created", response), ("response.failed", failed)]
    return [
        SSEFrame({"type": kind, "sequence_number": number, "response": shown}, event=kind)
        for number, (kind, shown) in enumerate(events)
    ]


def input_token_count_body(tokens: int) -> dict[str, Json]:
    """Return the body of /v1/responses/input_tokens."""
    return {"object": "response.input_tokens", "input_tokens": tokens}


# ----------------------------------------------------------------------------------------------- the request


def _check_unread(body: Fields) -> None:
    """Check the types of known fields that have no effect here."""
    body.object("metadata")
    body.text("truncation")


def _read_conversation(body: Fields, context: RequestContext) -> _Conversation:
    """Read the conversation. Instructions default to those of the earlier response."""

    referred: dict[str, Item] = {}

    def stored_item(name: str, param: str) -> Item:
        item = referred[name] = context.responses.item(context.tenant, name, param=param)
        return item

    instructions, previous = body.text("instructions"), body.text("previous_response_id")
    if previous is None:
        new = new_items(body, stored_item)
        return _Conversation((), referred, new, instructions)
    earlier = context.responses.get(context.tenant, previous, param="previous_response_id")
    instructions_in_force = earlier.instructions if instructions is None else instructions
    new = new_items(body, stored_item)
    made_items = {**referred, **earlier.made_items}
    return _Conversation(earlier.items, made_items, new, instructions_in_force)


def _read_messages(
    body: Fields,
    conversation: _Conversation,
    toolbox: Toolbox,
    images: ImageParser,
    context: RequestContext,
) -> tuple[Message, ...]:
    reader = ItemReader(
        toolbox=toolbox,
        images=images,
        opened=partial(context.seal.open, tenant=context.tenant),
        tell=context.notices.tell,
        keep_s=(keep_s := seconds_of_request(body)),
    )
    items = conversation.fields
    images.make_room(body, items)
    messages = reader.messages(items)
    if not messages:
        raise body.fail("input", "must be a string, or an array with at least one item that says something")
    instructions = conversation.instructions
    messages = (Message(role="system", content=instructions), *messages) if instructions else messages
    return with_end_kept(with_tools_kept(messages, body.objects("tools")), keep_s)


def _read_form(body: Fields, toolbox: Toolbox, elsewhere: Collection[str]) -> OutputConstraint:
    text = body.object("text")
    answer = read_answer(text.object("format") if text else None, nested=None)
    name_of = partial(_chosen_name, toolbox)
    return read_form(body, toolbox.names, answer=answer, name_of=name_of, elsewhere=elsewhere)


def _chosen_name(toolbox: Toolbox, tool: Fields) -> str | None:
    kind = tool.required_text("type")
    if responses_tool_type(kind).runs == "client":
        return kind
    if kind not in ("function", "custom"):
        return None
    return toolbox.flat(tool.text("namespace"), tool.required_text("name"))


def _read_options(body: Fields, context: RequestContext) -> GenerationOptions:
    most = body.integer("top_logprobs", TOP_LOGPROBS) or 0
    return read_generation(
        body,
        max_tokens=read_limit(body, *_LIMITS),
        vocabulary=context.model.card.vocabulary,
        top_logprobs=most if _LOGPROBS in body.array("include") else None,
    )


def _compared_with(body: Fields) -> str | None:
    """Return the random name of the response that the client compares this one with, if it does."""
    options = body.object("prompt_cache_options")
    compared = options.text("comparison_response_id") if options else None
    return None if compared is None else name_in(compared)


# -------------------------------------------------------------------------------------------------- the reply


def _wants_summary(body: Fields) -> bool:
    """Return True if the client asks for a summary. Such clients display only the summary."""
    asked = body.value("reasoning")
    return isinstance(asked, dict) and any(asked.get(name) for name in ("summary", "generate_summary"))


def _writable(repeated: dict[str, Json]) -> dict[str, Json]:
    """Check that the repeated fields can be encoded. A response nests them deeper than its request does.

    Raises:
        InvalidRequest: names a field that is nested too deeply.
    """
    for name, value in repeated.items():
        for _ in range(_DEEPER):
            value = [value]  # noqa: PLW2901 - what is checked is the value that deep in a response
        try:
            json.dumps(value)
        except RecursionError as error:
            raise InvalidRequest(f"'{name}' is nested too deeply.", param=name) from error
    return repeated


def _repeated(
    body: Fields, context: RequestContext, conversation: _Conversation, options: GenerationOptions
) -> dict[str, Json]:
    """Return the fields of the request that its response repeats."""
    reasoning, text = body.value("reasoning"), body.object("text")
    asked: Mapping[str, Json] = reasoning if isinstance(reasoning, dict) else {}
    return {
        "model": body.text("model") or context.model.card.id,
        "instructions": conversation.instructions,
        "max_output_tokens": options.max_tokens or None,
        "metadata": body.value("metadata") or {},
        "parallel_tool_calls": body.boolean("parallel_tool_calls", default=True),
        "previous_response_id": body.value("previous_response_id"),
        "prompt_cache_key": body.value("prompt_cache_key"),
        "prompt_cache_options": applied_options(body),
        "reasoning": {name: asked.get(name) for name in ("effort", "summary")},
        "store": _stores(body, options),
        "temperature": options.sampling.temperature,
        "text": {"format": text.value("format") if text and text.value("format") else FREE_TEXT},
        "tool_choice": body.value("tool_choice") or "auto",
        "tools": body.array("tools"),
        "top_p": options.sampling.top_p,
        "truncation": body.text("truncation") or "disabled",
        "user": body.value("user"),
    }


def _stores(body: Fields, options: GenerationOptions) -> bool:
    """Return whether the response is stored. A prewarm's has no reply to continue."""
    return body.boolean("store", default=True) and not options.is_prewarm


def _keep(
    context: RequestContext, conversation: _Conversation, is_wanted: bool, name: str, body: Mapping[str, Json]
) -> None:
    if is_wanted:
        items, made_ids = with_ids(conversation.items, conversation.made_items)
        response = StoredResponse(
            input=items,
            made_ids=(*conversation.made_items, *made_ids),
            instructions=conversation.instructions,
            body=body,
        )
        context.responses.keep(context.tenant, name, response)
