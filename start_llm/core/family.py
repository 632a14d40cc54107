"""The text format of a model family: reasoning, tool calls, call ids."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from start_llm.core.chat import Json

type WriteCalls = Callable[[Sequence[tuple[str, Mapping[str, Json]]]], str]
"""Returns the text of calls, each a name with its arguments."""
type CallIds = Literal["ordinal", "nine", "kimi"]


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The markers around reasoning. Newlines next to them belong to neither reasoning nor answer.

    Attributes:
        cut: text that the server writes to close reasoning that has used up its budget.
        is_unmistakable: ordinary text never contains these markers, so they are markers wherever they occur.
        ended_by: texts that only start tool calls; they end reasoning that is still open.
        label: the word that `opening` ends with. Models leave it out, so the mark is what stands before it.
    """

    opening: str
    closing: str
    cut: str
    is_unmistakable: bool = False
    ended_by: tuple[str, ...] = ()
    label: str = ""

    @property
    def mark(self) -> str:
        """The opening marker without its label."""
        return self.opening.removesuffix(self.label)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatTraits:
    """What a family of models and the format of its text have in common.

    Attributes:
        name: as in `MODEL_FAMILY`.
        reasoning: None for models without reasoning.
        channels: messages have headers with a channel and a recipient (Harmony).
        orphan_close: a reply may start inside its reasoning without an opening marker.
        answer_marks: markers around an answer that are not part of it; models write them nowhere else.
        around_answer: text that a model writes before and after an answer, for each kind of template. Without
            `answer_marks` ordinary text may contain it, and it counts only at the start and the end.
        reply_end: the answer mark that every reply ends with, also one that consists of calls.
        around_text: text that a model writes before and after a text that precedes its calls.
        call_ids: form of the call ids that the chat template gets: `call0`, nine characters,
            `functions.NAME:0`.
    """

    name: str
    reasoning: ReasoningMarks | None = None
    channels: bool = False
    orphan_close: bool = False
    answer_marks: tuple[str, ...] = ()
    around_answer: tuple[tuple[str, str], ...] = ()
    reply_end: str = ""
    around_text: tuple[str, str] = ("", "")
    call_ids: CallIds = "ordinal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(FormatTraits):
    """The format of the text that a model reads and writes.

    Attributes:
        formats: names of tool call formats (`formats.registry`), the most likely first; the others follow.
        calls_begin_answers: calls without a marker are recognised only at the start of an answer.
        marks: texts that the format itself writes; those that are tokens of their own are control tokens.
        write_calls: writes calls for templates that show none; None: in the form of Hermes.
    """

    formats: tuple[str, ...] = ()
    calls_begin_answers: bool = False
    marks: tuple[str, ...] = ()
    write_calls: WriteCalls | None = None
