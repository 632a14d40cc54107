"""gpt-oss: messages with headers, including reasoning and calls. `output.channels` parses them."""

from start_llm.core.family import ReasoningMarks
from start_llm.formats.model_format import ModelFormat

HARMONY = ModelFormat(
    name="gpt_oss",
    marks=("<|channel|>",),
    types=("gpt_oss",),
    reasoning=ReasoningMarks(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        cut="<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
    channels=True,
    around_text=("<|channel|>commentary<|message|>", "<|end|><|start|>assistant"),
)
