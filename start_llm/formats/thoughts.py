"""The marks that models put around their thoughts. A new pair is a row."""

from __future__ import annotations

from start_llm.core.family import ThoughtMarks

THINK = ThoughtMarks("<think>", "</think>", cut="\n</think>\n\n")
BRACKETS = ThoughtMarks("[THINK]", "[/THINK]", cut="[/THINK]")
COHERE = ThoughtMarks("<|START_THINKING|>", "<|END_THINKING|>", cut="<|END_THINKING|>")
GEMMA = ThoughtMarks("<|channel>thought", "<channel|>", cut="\n<channel|>")
SEED = ThoughtMarks("<seed:think>", "</seed:think>", cut="</seed:think>")
HARMONY = ThoughtMarks(
    "<|channel|>analysis<|message|>",
    "<|end|>",
    cut="<|end|><|start|>assistant<|channel|>final<|message|>",
)

THOUGHT_MARKS: tuple[ThoughtMarks, ...] = (
    ThoughtMarks("<mm:think>", "</mm:think>", cut="</mm:think>"),
    SEED,
    ThoughtMarks("<longcat_think>", "</longcat_think>", cut="\n</longcat_think>\n"),
    ThoughtMarks("<think:opensource>", "</think:opensource>", cut="</think:opensource>"),
    ThoughtMarks("<|think:start|>", "<|think:end|>", cut="<|think:end|>"),
    COHERE,
    ThoughtMarks("<|open|>think<|sep|>", "<|close|>think<|sep|>", cut="<|close|>think<|sep|>"),
    BRACKETS,
    THINK,
)
"""Those that any model may have, whatever its calls are: the more unmistakable first."""
