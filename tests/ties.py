"""A greedy reply equals mlx_lm's if it has the same tokens, but for near-ties of a random model.

Batches and chunks round differently. Where the two highest logits are almost the same, either may win, and
from there on two texts have nothing to do with each other. The same holds for the experts that a network
chooses: where two are almost equally good, the logits of one choice say nothing about those of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step

NEAR = 1e-3
TOKENS_FOR_EACH_TIE = 5_000


@dataclass(frozen=True)
class Reference:
    """A greedy reply of mlx_lm. `gaps` are the distances of the two highest logits, one for each token."""

    ids: tuple[int, ...]
    gaps: tuple[float, ...]


def greedy_reference(network: Any, prompt: Sequence[int], length: int) -> Reference:
    """`length` tokens of mlx_lm's own loop, one sequence alone."""
    steps = list(generate_step(mx.array(list(prompt)), network, max_tokens=length))
    best_two = mx.sort(mx.stack([logprobs for _, logprobs in steps]), axis=-1)[:, -2:]
    gaps: Any = (best_two[:, 1] - best_two[:, 0]).tolist()
    return Reference(tuple(int(token) for token, _ in steps), tuple(gaps))


@dataclass
class Tally:
    """Tokens that were compared, and near-ties among them that went the other way."""

    tokens: int = 0
    ties: int = 0

    def compare(self, ids: Sequence[int], reference: Reference) -> None:
        """Assert that `ids` are how the reference begins; after a near-tie nothing more is compared."""
        difference = self.difference(ids, reference)
        assert difference is None, difference

    def difference(
        self, ids: Sequence[int], reference: Reference, says_too: Callable[[int], bool] | None = None
    ) -> str | None:
        """Find where `ids` are not how the reference begins; None if they are, up to a near-tie.

        Args:
            says_too: whether the reference, computed in other pieces, goes on with `ids` at this place. Then
                it was a tie inside of the network, of two experts say, and the logits do not show it.
        """
        if len(ids) > len(reference.ids):
            return "the reference is too short to compare with"
        for place, (ours, theirs) in enumerate(zip(ids, reference.ids, strict=False)):
            self.tokens += 1
            if ours != theirs:
                gap = reference.gaps[place]
                if gap >= NEAR and not (says_too and says_too(place)):
                    return f"token {place} is {ours}, not {theirs}; its logit leads by {gap:.4f}"
                self.ties += 1
                return None
        return None

    @property
    def has_rare_ties(self) -> bool:
        """At most one for each 5,000 tokens: noise of 2e-5 turns about 4 in 100,000."""
        return self.ties <= max(1, self.tokens // TOKENS_FOR_EACH_TIE)

    def assert_ties_are_rare(self) -> None:
        assert self.has_rare_ties, f"{self.ties} near-ties in {self.tokens} tokens"
