"""Marks around reasoning that several formats share, or none has. A format's own marks stand in its file."""

from start_llm.core.family import ReasoningMarks


def unmistakable(opening: str, closing: str, *, cut: str = "") -> ReasoningMarks:
    """Marks that nobody writes about. The registry looks for them in models of every format."""
    return ReasoningMarks(opening, closing, cut or closing, is_unmistakable=True)


THINK = ReasoningMarks("<think>", "</think>", cut="\n</think>\n\n")

OTHER_MARKS: tuple[ReasoningMarks, ...] = (
    unmistakable("<|think:start|>", "<|think:end|>"),
    THINK,
)
"""Marks that no format owns. The most distinctive come first."""
