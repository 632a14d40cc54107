"""ERNIE 4.5: calls as in Hermes, and `<response>` around the answer of a thinking model."""

from __future__ import annotations

from start_llm.formats.model_format import ModelFormat
from start_llm.formats.qwen import QWEN
from start_llm.formats.reasoning_marks import THINK

ERNIE = ModelFormat(
    name="ernie",
    marks=("<response>\n", r"<response>\n"),
    types=("ernie",),
    reasoning=THINK,
    around_answer=(("<response>\n", "\n</response>"), ("<response>", "</response>")),
    notations=tuple(one for one in QWEN.notations if one.name == "hermes"),
)
