"""Defines the record that describes a model format. Each format module fills in one or more of them."""

from collections.abc import Callable
from dataclasses import dataclass, fields

import regex

from start_llm.core.family import Family, FormatTraits
from start_llm.formats.reading.parts import CallReader
from start_llm.formats.reading.schema import Tools
from start_llm.formats.writing.call_text import CallText

_MARKS = regex.compile(r"(?:\]<\]\w+\[>\[)?<{1,8}[^<>\n]+>{1,8}(?:\w+<\|sep\|>)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation:
    """One way to write tool calls.

    Attributes:
        openers: texts that begin a block of calls.
        reader: creates a reader for the block after an opener.
        bare: texts that also begin a block, but only at the start of an answer; they are part of the block.
        text: how calls are written; None for a notation that models only write by mistake.
        last_list: creates a reader for the bare `[NAME(…)]` that may end an answer behind its text.
        after_call: marks that models write after a call, besides those of `text` between `<` and `>`.
    """

    name: str
    openers: tuple[str, ...]
    reader: Callable[[Tools], CallReader]
    bare: tuple[str, ...] = ()
    text: CallText | None = None
    after_call: tuple[str, ...] = ()
    last_list: Callable[[Tools], CallReader] | None = None

    @property
    def closers(self) -> tuple[str, ...]:
        """The marks that may stand behind a call: those `<…>` that end it or its block, and `after_call`."""
        marks = _MARKS.findall(f"{self.text.tail}\n{self.text.after}") if self.text else ()
        return (*marks, *self.after_call)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFormat(FormatTraits):
    """The text format of a model, and the evidence by which it is detected from the model's files.

    Its `reasoning` are the usual marks, tried before `REASONING_MARKS`; None: only those are tried.

    Attributes:
        marks: the format fits if the chat template, its rendered text or the added tokens contain one.
        types: prefixes of `model_type` in config.json, used if no marks are found.
        notations: of calls, the likeliest first.
    """

    marks: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    notations: tuple[Notation, ...] = ()

    @property
    def family(self) -> Family:
        """The family of this format, with the usual marks of reasoning."""
        return Family(
            **{field.name: getattr(self, field.name) for field in fields(FormatTraits)},
            formats=tuple(notation.name for notation in self.notations),
            calls_begin_answers=any(
                notation.bare and notation.text and not notation.text.mark for notation in self.notations[:1]
            ),
            marks=(*self.marks, *(opener for notation in self.notations for opener in notation.openers)),
        )
