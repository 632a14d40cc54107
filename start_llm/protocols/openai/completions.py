"""Implements POST /v1/completions: text or token ids in, text out."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from start_llm.core.chat import Json, TextRequest
from start_llm.core.events import Content, Finished, Output, Prefilling
from start_llm.core.prompt_report import Divergence
from start_llm.protocols.base import (
    FrameTemplate,
    ParsedRequest,
    RequestContext,
    SSEFrame,
    new_id,
)
from start_llm.protocols.fields import Fields
from start_llm.protocols.generation_fields import (
    COMPLETION_LIMITS,
    FORMS_ELSEWHERE,
    GRAMMARS_ELSEWHERE,
    TOP_LOGPROBS,
    UNSUPPORTED_FIELDS,
    UnsupportedField,
    read_generation,
    read_limit,
    read_stream,
    refuse_demands,
    refuse_unsupported,
    token_ids,
)
from start_llm.protocols.logprobs import TextOffsets, text_logprobs
from start_llm.protocols.openai.completion_reply import CompletionReply
from start_llm.protocols.receipts import wants_receipt
from start_llm.protocols.sessions import lineage, session_id
from start_llm.protocols.urgency import service_tier

_PREWARMING_LIMITS = ("max_tokens", "n_predict")


_NOT_YET = (
    *UNSUPPORTED_FIELDS,
    UnsupportedField("best_of", 1, "must be 1: one reply is made for each request"),
    UnsupportedField("echo", False, "must be false: the prompt is not sent back"),
    UnsupportedField("suffix", "", "must be empty: insertion is not supported"),
)

_FORMS = ("response_format", "guided_json", *FORMS_ELSEWHERE, *GRAMMARS_ELSEWHERE)
_INSTEAD: Mapping[str, str] = dict.fromkeys(_FORMS, "a chat request with response_format")


def parse(body: Fields, headers: Mapping[str, str], context: RequestContext) -> ParsedRequest:
    """Parse a text completion request."""
    model = context.model
    refuse_unsupported(body, _NOT_YET)
    refuse_demands(body, _INSTEAD)
    stream, include_usage = read_stream(body)
    top_logprobs = body.integer("logprobs", TOP_LOGPROBS)
    request = TextRequest(
        prompt=_prompt(body, model.card.vocabulary),
        options=read_generation(
            body,
            max_tokens=read_limit(body, *COMPLETION_LIMITS, prewarming=_PREWARMING_LIMITS),
            vocabulary=model.card.vocabulary,
            top_logprobs=top_logprobs,
        ),
        session_id=session_id(body, headers),
        lineage=lineage(body),
    )
    reply = TextReply(
        requested_model=body.text("model") or model.card.id,
        model=model,
        include_usage=include_usage,
        with_token_ids=body.boolean("return_token_ids"),
        with_receipt=wants_receipt(body, headers),
        with_progress=body.boolean("return_progress"),
        with_logprobs=top_logprobs is not None,
        service_tier=service_tier(body, headers),
    )
    return ParsedRequest(request, reply, stream)


def _prompt(body: Fields, vocabulary: int) -> str | tuple[int, ...]:
    """Read a string, token ids, or an array with exactly one of either."""
    value = body.value("prompt")
    path = body.path_of("prompt")
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value, path = value[0], f"{path}[0]"
    if isinstance(value, str):
        return value
    if isinstance(value, list) and any(isinstance(item, str | list) for item in value):
        raise body.fail("prompt", "must be one prompt: one reply is made for each request")
    if not isinstance(value, list) or not value:
        raise body.fail("prompt", "is required and must be a string or a non-empty array of token ids")
    return token_ids(value, path, vocabulary)


@dataclass(slots=True)
class TextReply(CompletionReply):
    """Encodes one text completion."""

    id: str = field(default_factory=lambda: new_id("cmpl-"))
    offsets: TextOffsets = field(init=False)
    _frame_template: FrameTemplate = field(init=False)

    def __post_init__(self) -> None:
        self.offsets = TextOffsets(self.model.token_bytes)
        self._frame_template = FrameTemplate(self._data)

    def opening(
        self,
        prompt_tokens: int,  # noqa: ARG002 - reported at the end
        divergence: Divergence | None = None,  # noqa: ARG002 - no client can ask for it
    ) -> Iterable[SSEFrame]:
        yield self._chunk("")

    def keep_alive(self) -> SSEFrame:
        return self._chunk("")

    def progress(self, event: Prefilling) -> Iterable[SSEFrame]:
        return self.progress_frames("text_completion", self._choice("", finish_reason=None), event)

    def output(self, event: Output) -> Iterable[SSEFrame]:
        text = _text([event])
        if not (self.with_token_ids or self.with_logprobs):
            return [self._frame_template.frame(text)] if text else []
        return [self._chunk(text, **self._details([event]))]

    def closing(self, end: Finished) -> Iterable[SSEFrame]:
        choice = self._choice("", finish_reason=end.reason)
        return self.closing_frames("text_completion", choice, end)

    def whole(self, events: list[Output], end: Finished) -> Mapping[str, Json]:
        choice = self._choice(_text(events), finish_reason=end.reason, **self._details(events))
        return {**self.head("text_completion"), "choices": [choice], "usage": self.usage(end)}

    def _details(self, pieces: list[Output]) -> dict[str, Json]:
        details = self.token_ids(pieces)
        if self.with_logprobs:
            details["logprobs"] = text_logprobs(pieces, self.model.token_bytes, self.offsets)
        return details

    def _choice(self, text: str, *, finish_reason: str | None, **more: Json) -> dict[str, Json]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason, **more}

    def _chunk(self, text: str, **more: Json) -> SSEFrame:
        return SSEFrame(self._data(text, **more))

    def _data(self, text: str, **more: Json) -> Mapping[str, Json]:
        return {**self.head("text_completion"), "choices": [self._choice(text, finish_reason=None, **more)]}


def _text(events: Iterable[Output]) -> str:
    """Return the joined content. A text completion contains nothing else."""
    return "".join(event.text for event in events if isinstance(event, Content))
