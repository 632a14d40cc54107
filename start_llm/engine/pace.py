"""How long a forward pass takes, as two short ones tell: what a start may try follows from it."""

from __future__ import annotations

from dataclasses import dataclass

from start_llm.engine.pacing import Chunk


@dataclass(frozen=True, slots=True)
class Pace:
    """The seconds of a forward pass of a few tokens: some for the pass, and some for each token."""

    pass_s: float
    token_s: float

    @classmethod
    def between(cls, short: Chunk, longer: Chunk) -> Pace:
        """Return the pace of two chunks of different lengths; neither part is negative."""
        each = max(longer.seconds - short.seconds, 0.0) / (longer.tokens - short.tokens)
        each = min(each, longer.seconds / longer.tokens)
        return cls(max(short.seconds - each * short.tokens, 0.0), each)

    def seconds(self, *passes: int) -> float:
        """Return the seconds of forward passes of so many tokens each."""
        return self.pass_s * len(passes) + self.token_s * sum(passes)
