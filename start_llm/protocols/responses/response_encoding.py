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
    Reasoning,
    Usage,
)
from start_llm.core.ids import name_in
from start_llm.protocols.base import SSEFrame, new_id
from start_llm.protocols.logprobs import TokenBytes, logprob_entries
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
        asked: fields of the request that the response repeats.
        as_summary: send reasoning as summaries, which clients display.
        sealed: seals reasoning, for the client to send back.
        token_bytes: returns the bytes of a token id.
        keep: receives the body of a finished response.
    """

    asked: Mapping[str, Json]
    toolbox: Toolbox
    as_summary: bool
    sealed: Callable[[str, str], str]
    token_bytes: TokenBytes
    keep: Callable[[str, Mapping[str, Json]], None]
    id: str = field(default_factory=lambda: new_id("resp_"))
    created: int = field(default_factory=lambda: int(time.time()))
    _numbered: int = 0
    _items: list[dict[str, Json]] = field(default_factory=list[dict[str, Json]])
    _open: OutputItem | None = None
    _kind: type[Output] | None = None

    def opening(self, prompt_tokens: int) -> Iterable[SSEFrame]:  # noqa: ARG002 - told at the end
        yield self._state("created")
        yield self._state("in_progress")

    def keep_alive(self) -> SSEFrame:
        return self._state("in_progress")

    def output(self, event: Output) -> Iterable[SSEFrame]:
        return self._frames(self._told(event))

    def closing(self, end: Finished) -> Iterable[SSEFrame]:
        yield from self._frames(self._close_last(end))
        yield self._frame(_status(end), {"response": self._ended(end)})

    def failure(self, message: str) -> SSEFrame:
        error: Json = {"code": "server_error", "message": message}
        return self._frame("failed", {"response": {**self._body("failed"), "error": error}})

    def whole(self, events: list[Output], end: Finished) -> Mapping[str, Json]:
        for event in events:
            list(self._told(event))
        list(self._close_last(end))
        return self._ended(end)

    # ------------------------------------------------------------------------------------------------- items

    def _told(self, event: Output) -> Iterator[Event]:
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
        return self._close(_INCOMPLETE if self._kind is CallStarted else _status(end))

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
            **self.asked,
            "output": [*self._items],
            "usage": None,
        }

    def _ended(self, end: Finished) -> dict[str, Json]:
        """Return the final body of a response and store it, so that clients can continue it."""
        status = _status(end)
        body: dict[str, Json] = {
            **self._body(status),
            "completed_at": int(time.time()),
            "usage": usage_json(end.usage),
        }
        if status == _INCOMPLETE:
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        self.keep(self.id, body)
        return body


def _status(end: Finished) -> str:
    return _INCOMPLETE if end.reason == "length" else _COMPLETED


def usage_json(usage: Usage) -> dict[str, Json]:
    """Return the real counts. `cached_tokens` were not computed; `reasoning_tokens` are output tokens."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.total,
    }
