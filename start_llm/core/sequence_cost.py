"""How many bytes of KV cache a sequence needs, by its length."""

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WindowCost:
    """The cost of sliding-window layers: bytes per token, and the window's length in tokens."""

    token_bytes: int
    tokens: int


@dataclass(frozen=True, slots=True)
class SequenceCost:
    """KV cache bytes of one sequence, by the kind of its layers.

    Attributes:
        token_bytes: per token, of layers that keep every token.
        windows: of sliding-window layers.
        state_bytes: of layers whose state does not grow.
    """

    token_bytes: int = 0
    windows: tuple[WindowCost, ...] = ()
    state_bytes: int = 0

    def bytes_of(self, tokens: int) -> int:
        """Return the bytes that a sequence of `tokens` tokens needs."""
        sliding = sum(window.token_bytes * min(tokens, window.tokens) for window in self.windows)
        return self.token_bytes * tokens + sliding + self.state_bytes

    def tokens_in(self, nbytes: int) -> int:
        """Return the largest number of tokens that fits into `nbytes`."""
        return max(bisect_right(range(2**31 + 1), nbytes, key=self.bytes_of) - 1, 0)
