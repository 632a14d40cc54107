"""What the form of a model's text is: thoughts, calls, ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

type CallIds = Literal["ordinal", "nine", "kimi"]

FAMILY_NAMES = ("qwen3", "glm4", "gemma4", "gpt_oss", "mistral", "llama3", "kimi", "minicpm", "generic")
"""What `MODEL_FAMILY` may say."""


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """Text around a thought. Newlines next to the marks belong to neither thought nor answer.

    `cut` is what the server writes to close a thought that has used up its budget.
    """

    opening: str
    closing: str
    cut: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The form of the text that a model reads and writes.

    Attributes:
        name: as in `MODEL_FAMILY`.
        thought: None for models without thoughts.
        channels: messages have headers with a channel and a recipient (Harmony).
        orphan_close: a thinking reply may begin inside its thought although nothing opened one.
        formats: tool-call formats of `output.tool_calls.FORMATS`, the likeliest first; the others follow.
        call_ids: the ids of calls that the chat template gets: `call0`, nine characters, `functions.NAME:0`.
    """

    name: str
    thought: ThoughtMarks | None = None
    channels: bool = False
    orphan_close: bool = False
    formats: tuple[str, ...] = ()
    call_ids: CallIds = "ordinal"
