"""The marks that models put around their thoughts. A new pair is a row."""

from __future__ import annotations

from dataclasses import replace

from start_llm.core.family import ThoughtMarks


def _unmistakable(opening: str, closing: str, *, cut: str = "") -> ThoughtMarks:
    return ThoughtMarks(opening, closing, cut or closing, is_unmistakable=True)


THINK = ThoughtMarks("<think>", "</think>", cut="\n</think>\n\n")
THINK_OF_KIMI = replace(THINK, ended_by=("<|tool_calls_section_begin|>",))
BRACKETS = _unmistakable("[THINK]", "[/THINK]")
COHERE = _unmistakable("<|START_THINKING|>", "<|END_THINKING|>")
GEMMA = _unmistakable("<|channel>thought", "<channel|>", cut="\n<channel|>")
MINIMAX = _unmistakable("<mm:think>", "</mm:think>")
LONGCAT = _unmistakable("<longcat_think>", "</longcat_think>", cut="\n</longcat_think>\n")
SEED = _unmistakable("<seed:think>", "</seed:think>")
OPEN_CLOSE = _unmistakable("<|open|>think<|sep|>", "<|close|>think<|sep|>")
HARMONY = ThoughtMarks(
    "<|channel|>analysis<|message|>",
    "<|end|>",
    cut="<|end|><|start|>assistant<|channel|>final<|message|>",
)

THOUGHT_MARKS: tuple[ThoughtMarks, ...] = (
    MINIMAX,
    SEED,
    LONGCAT,
    _unmistakable("<think:opensource>", "</think:opensource>"),
    _unmistakable("<|think:start|>", "<|think:end|>"),
    COHERE,
    OPEN_CLOSE,
    BRACKETS,
    THINK,
)
"""Those that any model may have, whatever its calls are: the more unmistakable first."""
