"""Encodes a response as one body or as numbered events. Both use the same items."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from start_llm.core.chat import Json
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
from start_llm.core.ids import name_in
from start_llm.core.prompt_report import Divergence
from start_llm.protocols.base import SSEFrame, new_id
from start_llm.protocols.logprobs import TokenBytes, logprob_entries
from start_llm.protocols.receipts import receipt_json
from start_llm.protocols.responses.items import (
    Event,
    OutputItem,
    call_item,
    reasoning_item,
    text_item,
)
from start_llm.protocols.responses.tools import Toolbox

_COMPLETED, _INCOMPLETE = "completed", "incomplete"


@dataclass(slots=True, kw_only=True)
class ResponseReply:
    """Encodes one response.

    Attributes:
        repeated: fields of the request that the response repeats.
        as_summary: send reasoning as summaries, which clients display.
        sealed: seals reasoning, for the client to send back.
        token_bytes: returns the bytes of a token id.
        keep: receives the body of a finished response.
        with_receipt: usage has a receipt.
        with_diagnostics: say where the prompt leaves an earlier one, if it does.
        is_prewarm: nothing was to be generated, so a response without output is complete.
    """

    repeated: Mapping[str, Json]
    toolbox: Toolbox
    as_summary: bool
    sealed: Callable[[str, str], str]
    token_bytes: TokenBytes
    keep: Callable[[str, Mapping[str, Json]], None]
    with_receipt: bool = False
    with_diagnostics: bool = False
    is_prewarm: bool = False
    id: str = field(default_factory=lambda: new_id("resp_"))
    created: int = field(default_factory=lambda: int(time.time()))
    _numbered: int = 0
    _items: list[dict[str, Json]] = field(default_factory=list[dict[str, Json]])
    _open: OutputItem | None = None
    _kind: type[Output] | None = None

    def opening(
        self,
        prompt_tokens: int,  # noqa: ARG002 - reported at the end
        divergence: Divergence | None = None,  # noqa: ARG002 - reported at the end
    ) -> Iterable[SSEFrame]:
        yield self._state("created")
        yield self._state("in_progress")

    def keep_alive(self) -> SSEFrame:
        return self._state("in_progress")

    def progress(self, event: Prefilling) -> Iterable[SSEFrame]:  # noqa: ARG002 - no event has a place for it
        return ()

    def output(self, event: Output) -> Iterable[SSEFrame]:
        return self._frames(self._item_events(event))

    def closing(self, end: Finished) -> Iterable[SSEFrame]:
        yield from self._frames(self._close_last(end))
        yield self._frame(self._status(end), {"response": self._ended(end)})

    def failure(self, message: str) -> SSEFrame:
        error: Json = {"code": "server_error", "message": message}
        return self._frame("failed", {"response": {**self._body("failed"), "error": error}})

    def whole(self, events: list[Output], end: Finished) -> Mapping[str, Json]:
        for event in events:
            list(self._item_events(event))
        list(self._close_last(end))
        return self._ended(end)

    # ------------------------------------------------------------------------------------------------- items

    def _item_events(self, event: Output) -> Iterator[Event]:
        match event:
            case Content(text) | Reasoning(text):
                if text and self._kind is not type(event):
                    yield from self._begin(event)
                yield from self._grow(text, logprob_entries(event.logprobs, self.token_bytes))
            case CallStarted():
                yield from self._begin(event)
            case CallArguments(text=text):
                yield from self._grow(text)
            case CallEnded():
                yield from self._close(_COMPLETED)

    def _begin(self, event: Content | Reasoning | CallStarted) -> Iterator[Event]:
        """Begin a new item and close the one before it."""
        yield from self._close(_COMPLETED)
        self._kind, self._open = type(event), self._new_item(event)
        yield from self._open.begins()

    def _new_item(self, event: Content | Reasoning | CallStarted) -> OutputItem:
        index, name_of_this = len(self._items), name_in(self.id)
        match event:
            case Content():
                return text_item(index, name_of_this)
            case Reasoning():
                return reasoning_item(index, name_of_this, self.sealed, as_summary=self.as_summary)
            case CallStarted(name=name, id=call_id):
                return call_item(index, name_of_this, self.toolbox.called(name), call_id)

    def _grow(self, text: str, scores: Sequence[Json] = ()) -> Iterator[Event]:
        if text and self._open:
            yield from self._open.grows(text, [*scores])

    def _close(self, status: str) -> Iterator[Event]:
        if self._open:
            yield from self._open.ends(status)
            self._items.append(self._open.json(status))
        self._kind = self._open = None

    def _close_last(self, end: Finished) -> Iterator[Event]:
        """Close the last item. An open call was cut, so it is incomplete."""
        return self._close(_INCOMPLETE if self._kind is CallStarted else self._status(end))

    # ---------------------------------------------------------------------------------------------- the whole

    def _frames(self, events: Iterable[Event]) -> Iterator[SSEFrame]:
        return (self._frame(name, fields) for name, fields in events)

    def _frame(self, name: str, fields: Mapping[str, Json]) -> SSEFrame:
        number = self._numbered
        self._numbered += 1
        kind = f"response.{name}"
        return SSEFrame({"type": kind, "sequence_number": number, **fields}, event=kind)

    def _state(self, name: str) -> SSEFrame:
        return self._frame(name, {"response": self._body("in_progress")})

    def _body(self, status: str) -> dict[str, Json]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            **self.repeated,
            "output": [*self._items],
            "usage": None,
        }

    def _ended(self, end: Finished) -> dict[str, Json]:
        """Return the final body of a response and store it, so that clients can continue it."""
        status = self._status(end)
        body: dict[str, Json] = {
            **self._body(status),
            "completed_at": int(time.time()),
            "usage": self._usage(end),
        }
        if self.with_diagnostics:
            body["prompt_cache_diagnostics"] = _diagnostics(end.divergence)
        if status == _INCOMPLETE:
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        self.keep(self.id, body)
        return body

    def _status(self, end: Finished) -> str:
        return _INCOMPLETE if end.reason == "length" and not self.is_prewarm else _COMPLETED

    def _usage(self, end: Finished) -> dict[str, Json]:
        """Return the real counts.

        `cached_tokens` were not computed, `cache_write_tokens` were and are kept; `reasoning_tokens` are
        output tokens.
        """
        usage, receipt = end.usage, end.receipt
        counts: dict[str, Json] = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {
                "cached_tokens": usage.cached,
                "cache_write_tokens": receipt.written,
            },
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.total,
        }
        return {**counts, "receipt": receipt_json(receipt)} if self.with_receipt else counts


_MISS_REASONS = {
    "model": "model_changed",
    "system": "input_changed",
    "tools": "tools_changed",
    "messages": "input_changed",
}
"""Reasons of `PromptCacheDiagnostics` (openai 3.57), by the place of the divergence."""


def _diagnostics(divergence: Divergence | None) -> Json:
    if divergence is None:
        return {"type": "cache_hit"}
    if divergence.place == "unknown":
        return {"type": "comparison_response_not_found"}
    if divergence.place not in _MISS_REASONS:
        return {"type": "unavailable"}
    reason = _MISS_REASONS[divergence.place]
    return {"type": "cache_miss", "reason": reason, "cache_missed_tokens": divergence.missed}
