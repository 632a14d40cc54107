"""What the form of a model's text is: thoughts, calls, ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

type CallIds = Literal["ordinal", "nine", "kimi"]


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """Text around a thought. Newlines next to the marks belong to neither thought nor answer.

    Attributes:
        cut: what the server writes to close a thought that has used up its budget.
        is_unmistakable: nobody writes about these marks, so they are marks wherever they stand.
        ended_by: texts that begin calls and nothing else: a thought that is still open ends there.
    """

    opening: str
    closing: str
    cut: str
    is_unmistakable: bool = False
    ended_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The form of the text that a model reads and writes.

    Attributes:
        name: as in `MODEL_FAMILY`.
        thought: None for models without thoughts.
        channels: messages have headers with a channel and a recipient (Harmony).
        orphan_close: a thinking reply may begin inside its thought although nothing opened one.
        answer_marks: texts around an answer that are no part of it; models write them nowhere else.
        around_answer: what a model writes in front of an answer and behind it, for each kind of template.
        formats: names of notations of calls (`formats.registry`), the likeliest first; the others follow.
        around_text: what a model writes around a text in front of its calls.
        call_ids: the ids of calls that the chat template gets: `call0`, nine characters, `functions.NAME:0`.
    """

    name: str
    thought: ThoughtMarks | None = None
    channels: bool = False
    orphan_close: bool = False
    answer_marks: tuple[str, ...] = ()
    around_answer: tuple[tuple[str, str], ...] = ()
    formats: tuple[str, ...] = ()
    around_text: tuple[str, str] = ("", "")
    call_ids: CallIds = "ordinal"
