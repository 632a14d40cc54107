"""The output items of a response, while they are written: one class, and a form for each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from start_llm.core.chat import Json
from start_llm.protocols.fields import parse_embedded
from start_llm.protocols.responses_tools import CUSTOM_ARGUMENT, Offered

type Event = tuple[str, dict[str, Json]]
"""Its name without `response.`, and its own fields."""
type Parts = list[Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How the text of an item is told.

    Attributes:
        text: names the events of the text.
        whole: names the whole text in the last of them.
        place: where the text stands in the item.
        is_scored: the log-probabilities of its tokens are told, if there are any.
        is_live: told while it is written, and not only when it is whole.
        read: the whole text, as the client has it.
        part: names the events of the part that holds the text; empty: it is in none.
        part_fields: of that part, but for the text.
    """

    text: str
    whole: str = "text"
    place: Mapping[str, Json] = field(default_factory=dict[str, Json])
    is_scored: bool = False
    is_live: bool = True
    read: Callable[[str], str] = str
    part: str = ""
    part_fields: Mapping[str, Json] = field(default_factory=dict[str, Json])


class OutputItem:
    """One item, from its first event to its last.

    Args:
        index: in the output.
        prefix: of its id, which ends with the name of the response.
        described: its own fields; gets its text so far and the parts that hold it.
        named: other fields of the event that has the whole text.
    """

    def __init__(
        self,
        form: Form,
        index: int,
        prefix: str,
        reply_name: str,
        described: Callable[[str, Parts], Mapping[str, Json]],
        named: Mapping[str, Json] | None = None,
    ) -> None:
        self._form = form
        self._described = described
        self._named = named or {}
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
        self._written.append(text)
        self._scores += scores
        if self._form.is_live:
            yield self._delta(text, scores)

    def ends(self, status: str) -> Iterator[Event]:
        """The last one has the whole item."""
        form, text = self._form, self._text()
        if text and not form.is_live:
            yield self._delta(text, self._scores)
        yield (
            f"{form.text}.done",
            {**self._place, form.whole: text, **self._told(self._scores), **self._named},
        )
        if form.part:
            yield f"{form.part}.done", {**self._place, "part": self._part(text)}
        yield "output_item.done", {"output_index": self._index, "item": self.json(status)}

    def json(self, status: str) -> dict[str, Json]:
        """The item with all that was written."""
        text = self._text()
        return self._json(status, text, [self._part(text)] if self._form.part else [])

    def _json(self, status: str, text: str, parts: Parts) -> dict[str, Json]:
        return {"id": self._id, "status": status, **self._described(text, parts)}

    def _text(self) -> str:
        return self._form.read("".join(self._written))

    def _part(self, text: str) -> dict[str, Json]:
        return {"text": text, **self._form.part_fields, **self._told(self._scores)}

    def _delta(self, text: str, scores: Parts) -> Event:
        return f"{self._form.text}.delta", {**self._place, "delta": text, **self._told(scores)}

    def _told(self, scores: Parts) -> dict[str, Json]:
        return {"logprobs": [*scores]} if self._form.is_scored else {}


# ------------------------------------------------------------------------------------------------- the kinds

_CONTENT: Mapping[str, Json] = {"content_index": 0}
_TEXT = Form(
    text="output_text",
    place=_CONTENT,
    is_scored=True,
    part="content_part",
    part_fields={"type": "output_text", "annotations": []},
)
_THOUGHT = Form(
    text="reasoning_text", place=_CONTENT, part="content_part", part_fields={"type": "reasoning_text"}
)
_SUMMARY = Form(
    text="reasoning_summary_text",
    place={"summary_index": 0},
    part="reasoning_summary_part",
    part_fields={"type": "summary_text"},
)
_CALL = Form(text="function_call_arguments", whole="arguments")


def _custom_input(arguments: str) -> str:
    """The text in the arguments; arguments of any other form are the text."""
    parsed = parse_embedded(arguments)
    text = parsed.get(CUSTOM_ARGUMENT) if isinstance(parsed, dict) else None
    return text if isinstance(text, str) else arguments


_CUSTOM_CALL = Form(text="custom_tool_call_input", whole="input", is_live=False, read=_custom_input)


def text_item(index: int, reply_name: str) -> OutputItem:
    """A text of the answer."""

    def described(_: str, parts: Parts) -> Mapping[str, Json]:
        return {"type": "message", "role": "assistant", "content": parts}

    return OutputItem(_TEXT, index, "msg_", reply_name, described)


def thought_item(
    index: int, reply_name: str, sealed: Callable[[str, str], str], *, as_summary: bool
) -> OutputItem:
    """A thought, in clear and sealed: clients may keep either."""

    def described(text: str, parts: Parts) -> Mapping[str, Json]:
        told: Mapping[str, Json] = {"summary": parts} if as_summary else {"summary": [], "content": parts}
        return {"type": "reasoning", **told, "encrypted_content": sealed(text, reply_name) if text else None}

    return OutputItem(_SUMMARY if as_summary else _THOUGHT, index, "rs_", reply_name, described)


def call_item(index: int, reply_name: str, tool: Offered, call_id: str) -> OutputItem:
    """A call, by the names that the client has for the tool."""
    kind, form = ("custom_tool_call", _CUSTOM_CALL) if tool.is_custom else ("function_call", _CALL)
    name: dict[str, Json] = {"name": tool.name}
    told: dict[str, Json] = {"type": kind, "call_id": f"call{call_id}", **name}
    if tool.namespace is not None:
        told["namespace"] = tool.namespace

    def described(text: str, _: Parts) -> Mapping[str, Json]:
        return {**told, form.whole: text}

    return OutputItem(
        form,
        index,
        "ctc_" if tool.is_custom else "fc_",
        reply_name,
        described,
        {} if tool.is_custom else name,
    )
