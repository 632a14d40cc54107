"""Calls in the native form of each notation, as its file writes them."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from start_llm.core.family import Family
from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.schema import Tools
from start_llm.formats.reading.tagged import TaggedReader
from start_llm.formats.registry import HARMONY as GPT_OSS
from start_llm.formats.registry import MODEL_FORMATS, NOTATIONS
from start_llm.formats.writing.arguments import TaggedArguments
from start_llm.formats.writing.call_text import CallText
from tests.output.corpus.case import TAGS, Call

type Write = Callable[[Sequence[Call]], str]


@dataclass(frozen=True)
class Writer:
    """How calls are written.

    Attributes:
        opener: what begins a call; "" where a bare object does.
        streams: arguments go out before the call is whole.
        states_types: each argument says itself if it is text.
        starts_reply: only the very first text of an answer can be a call.
    """

    name: str
    family: Family
    write: Write
    opener: str
    streams: bool = False
    states_types: bool = False
    starts_reply: bool = False

    def call(self, name: str, **arguments: Any) -> str:
        return self.write([Call(name, arguments)])


def _write(text: CallText) -> Write:
    return lambda calls: text.write([(call.name, call.arguments) for call in calls])


def _family(model: ModelFormat) -> Family:
    """With the marks of reasoning that the common cases have."""
    return Family(name=model.name, reasoning=TAGS, formats=model.family.formats)


def _writers(model: ModelFormat) -> Iterator[Writer]:
    for notation in model.notations:
        if notation.text:
            opener = _opener(notation, notation.text)
            yield Writer(
                notation.name,
                _family(model),
                _write(notation.text),
                opener=opener,
                streams=_streams(notation),
                states_types=_states_types(notation.text),
                starts_reply=not opener,
            )


def _opener(notation: Notation, text: CallText) -> str:
    """The one that its calls begin with, if any."""
    written = text.write([("list", {})])
    return next((opener for opener in notation.openers if written.startswith(opener)), "")


def _streams(notation: Notation) -> bool:
    return isinstance(notation.reader(Tools([])), TaggedReader)


def _states_types(text: CallText) -> bool:
    return isinstance(text.arguments, TaggedArguments) and bool(text.arguments.types)


def _harmony(calls: Sequence[Call]) -> str:
    return "".join(
        f"<|start|>assistant<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>"
        f"{json.dumps(call.arguments, ensure_ascii=False)}<|call|>"
        for call in calls
    )


def _of_all() -> Iterator[Writer]:
    for model in MODEL_FORMATS:
        yield from _writers(model)
    llama = NOTATIONS["llama_bare"].text
    assert llama is not None
    bare = _write(llama)
    of_llama = next(_family(model) for model in MODEL_FORMATS if model.name == "llama3")
    yield Writer("llama_python", of_llama, lambda calls: "<|python_tag|>" + bare(calls), "<|python_tag|>")
    yield Writer("harmony", HARMONY, _harmony, "<|start|>")


HARMONY = Family(name=GPT_OSS.name, channels=True)
WRITERS: Mapping[str, Writer] = {writer.name: writer for writer in _of_all()}
