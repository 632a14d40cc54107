"""Writes the output items of a response: one class, and a form for each kind of item."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from start_llm.core.chat import Json
from start_llm.protocols.custom_tools import CustomInput
from start_llm.protocols.responses.built_in_calls import BUILT_IN_CALLS, BuiltInCall
from start_llm.protocols.responses.tools import CUSTOM_CALL, ClientTool

type Event = tuple[str, dict[str, Json]]
"""The event's name without `response.`, and its own fields."""
type Parts = list[Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemEncoding:
    """The encoding of an item's text.

    Attributes:
        text: prefix of the names of the text events; empty: there are none.
        whole: the field of the last text event that contains the whole text.
        place: position of the text in the item.
        is_scored: events include the log-probabilities of their tokens.
        is_live: the text is streamed.
        reader: creates what converts the text to the client's form; None: it has that form.
        part: prefix of the names of the events of the part with the text; empty: there is no part.
        part_fields: fields of that part, except the text.
    """

    text: str
    whole: str = "text"
    place: Mapping[str, Json] = field(default_factory=dict[str, Json])
    is_scored: bool = False
    is_live: bool = True
    reader: Callable[[], CustomInput] | None = None
    part: str = ""
    part_fields: Mapping[str, Json] = field(default_factory=dict[str, Json])


class OutputItem:
    """One item, from its first event to its last.

    Args:
        index: position in the output.
        prefix: prefix of its id; the id ends with the name of the response.
        described: returns the item's own fields for its text so far and the parts that contain it.
        named: more fields of the event that has the whole text.
    """

    def __init__(
        self,
        form: ItemEncoding,
        index: int,
        prefix: str,
        reply_name: str,
        described: Callable[[str, Parts], Mapping[str, Json]],
        named: Mapping[str, Json] | None = None,
    ) -> None:
        self._form = form
        self._described = described
        self._named = named or {}
        self._reader = form.reader() if form.reader else None
        self._written: list[str] = []
        self._scores: list[Json] = []
        self._id = f"{prefix}{index}_{reply_name}"
        self._place: dict[str, Json] = {"item_id": self._id, "output_index": index, **form.place}
        self._index = index

    def begins(self) -> Iterator[Event]:
        item = self._json("in_progress", "", [])
        yield "output_item.added", {"output_index": self._index, "item": item}
        if self._form.part:
            yield f"{self._form.part}.added", {**self._place, "part": self._part("")}

    def grows(self, text: str, scores: Parts) -> Iterator[Event]:
        written = self._reader.feed(text) if self._reader else text
        yield from self._grows(written, scores)

    def _grows(self, text: str, scores: Parts) -> Iterator[Event]:
        self._written.append(text)
        self._scores += scores
        if self._form.is_live and text:
            yield self._delta(text, scores)

    def ends(self, status: str) -> Iterator[Event]:
        """Yield the last events. The final one has the whole item."""
        yield from self._grows(self._reader.finish() if self._reader else "", [])
        form, text = self._form, self._text()
        if form.text:
            yield (
                f"{form.text}.done",
                {**self._place, form.whole: text, **self._logprobs(self._scores), **self._named},
            )
        if form.part:
            yield f"{form.part}.done", {**self._place, "part": self._part(text)}
        yield "output_item.done", {"output_index": self._index, "item": self.json(status)}

    def json(self, status: str) -> dict[str, Json]:
        """Return the item with all text written so far."""
        text = self._text()
        return self._json(status, text, [self._part(text)] if self._form.part else [])

    def _json(self, status: str, text: str, parts: Parts) -> dict[str, Json]:
        return {"id": self._id, "status": status, **self._described(text, parts)}

    def _text(self) -> str:
        return "".join(self._written)

    def _part(self, text: str) -> dict[str, Json]:
        return {"text": text, **self._form.part_fields, **self._logprobs(self._scores)}

    def _delta(self, text: str, scores: Parts) -> Event:
        return f"{self._form.text}.delta", {**self._place, "delta": text, **self._logprobs(scores)}

    def _logprobs(self, scores: Parts) -> dict[str, Json]:
        return {"logprobs": [*scores]} if self._form.is_scored else {}


# ------------------------------------------------------------------------------------------------- the kinds

_CONTENT: Mapping[str, Json] = {"content_index": 0}
_TEXT = ItemEncoding(
    text="output_text",
    place=_CONTENT,
    is_scored=True,
    part="content_part",
    part_fields={"type": "output_text", "annotations": []},
)
_REASONING = ItemEncoding(
    text="reasoning_text", place=_CONTENT, part="content_part", part_fields={"type": "reasoning_text"}
)
_SUMMARY = ItemEncoding(
    text="reasoning_summary_text",
    place={"summary_index": 0},
    part="reasoning_summary_part",
    part_fields={"type": "summary_text"},
)
_CALL = ItemEncoding(text="function_call_arguments", whole="arguments")
_BUILT_IN_CALL = ItemEncoding(text="", is_live=False)
_CUSTOM_CALL = ItemEncoding(text="custom_tool_call_input", whole="input", reader=CustomInput)


def text_item(index: int, reply_name: str) -> OutputItem:
    """Return an item for text of the answer."""

    def described(_: str, parts: Parts) -> Mapping[str, Json]:
        return {"type": "message", "role": "assistant", "content": parts}

    return OutputItem(_TEXT, index, "msg_", reply_name, described)


def reasoning_item(
    index: int, reply_name: str, sealed: Callable[[str, str], str], *, as_summary: bool
) -> OutputItem:
    """Return an item with clear and sealed reasoning; clients may keep either."""

    def described(text: str, parts: Parts) -> Mapping[str, Json]:
        shown: Mapping[str, Json] = {"summary": parts} if as_summary else {"summary": [], "content": parts}
        return {"type": "reasoning", **shown, "encrypted_content": sealed(text, reply_name) if text else None}

    return OutputItem(_SUMMARY if as_summary else _REASONING, index, "rs_", reply_name, described)


def call_item(index: int, reply_name: str, tool: ClientTool, call_id: str) -> OutputItem:
    """Return an item for a call, with the client's names for the tool."""
    fields: dict[str, Json] = {"type": tool.call_item, "call_id": f"call{call_id}"}
    if tool.call_item in BUILT_IN_CALLS:
        return _built_in_call_item(index, reply_name, BUILT_IN_CALLS[tool.call_item], fields)
    is_custom = tool.call_item == CUSTOM_CALL
    form = _CUSTOM_CALL if is_custom else _CALL
    fields["name"] = tool.name
    if tool.namespace is not None:
        fields["namespace"] = tool.namespace

    def described(text: str, _: Parts) -> Mapping[str, Json]:
        return {**fields, form.whole: text}

    named: Mapping[str, Json] = {} if is_custom else {"name": tool.name}
    return OutputItem(form, index, "ctc_" if is_custom else "fc_", reply_name, described, named)


def _built_in_call_item(
    index: int, reply_name: str, call: BuiltInCall, fields: Mapping[str, Json]
) -> OutputItem:
    def described(text: str, _: Parts) -> Mapping[str, Json]:
        return {**fields, call.member: call.written(text)}

    return OutputItem(_BUILT_IN_CALL, index, call.prefix, reply_name, described)
