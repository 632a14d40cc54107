"""What one file of this package says of a model format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from start_llm.core.family import CallIds, Family, ThoughtMarks
from start_llm.formats.reading.parts import Reader
from start_llm.formats.reading.schema import Tools
from start_llm.formats.writing.call_text import CallText


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation:
    """One way to write calls.

    Attributes:
        openers: texts that begin a block of calls.
        reader: makes a reader for the block behind one of them.
        bare: texts that begin a block too, as the very first text of an answer; they are part of it.
        text: how calls are written; None for what models write by mistake alone.
    """

    name: str
    openers: tuple[str, ...]
    reader: Callable[[Tools], Reader]
    bare: tuple[str, ...] = ()
    text: CallText | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFormat:
    """What a model's text is like, and how that is told from its files.

    Attributes:
        name: as in `MODEL_FAMILY`.
        marks: texts of which one must stand in the chat template, in what it renders, or be an added token.
        types: beginnings of `model_type` in config.json, for files that say too little.
        notations: of calls, the likeliest first.
        thought: of models that think; None: their marks are found in the template and the vocabulary.
        channels, orphan_close, answer_marks, around_answer, around_text, call_ids: see `core.family.Family`.
    """

    name: str
    marks: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    notations: tuple[Notation, ...] = ()
    thought: ThoughtMarks | None = None
    channels: bool = False
    orphan_close: bool = False
    answer_marks: tuple[str, ...] = ()
    around_answer: tuple[tuple[str, str], ...] = ()
    around_text: tuple[str, str] = ("", "")
    call_ids: CallIds = "ordinal"

    @property
    def family(self) -> Family:
        """With the marks of thoughts that its models have as a rule."""
        return Family(
            name=self.name,
            thought=self.thought,
            channels=self.channels,
            orphan_close=self.orphan_close,
            answer_marks=self.answer_marks,
            around_answer=self.around_answer,
            around_text=self.around_text,
            formats=tuple(one.name for one in self.notations),
            call_ids=self.call_ids,
        )
