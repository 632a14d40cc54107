"""gpt-oss: messages with headers, a thought and a call among them. `output.channels` reads them."""

from __future__ import annotations

from start_llm.formats.model_format import ModelFormat
from start_llm.formats.thoughts import HARMONY as MARKS

HARMONY = ModelFormat(
    name="gpt_oss",
    marks=("<|channel|>",),
    types=("gpt_oss",),
    thought=MARKS,
    channels=True,
    around_text=("<|channel|>commentary<|message|>", "<|end|><|start|>assistant"),
)
