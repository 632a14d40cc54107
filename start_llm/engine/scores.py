"""Compute log-probabilities of sampled tokens, for requests that ask for them. Runs on the engine thread."""

from typing import cast

import mlx.core as mx

from start_llm.core.events import ScoredToken, TokenLogprobs
from start_llm.engine.sampler import top_k_ids


class Scores:
    """The log-probabilities of one sequence and one step.

    They are computed together with the token, so nothing has to wait for the next step.

    Args:
        logits: [vocabulary], after all processors.
        sampled: the token's id, [].
        alternatives: number of most likely tokens to report beside it.
    """

    def __init__(self, logits: mx.array, sampled: mx.array, alternatives: int) -> None:
        scores = logits.astype(mx.float32)
        self._scores = scores - mx.logsumexp(scores)
        self._sampled = sampled
        self._chosen = self._scores[sampled]
        self._ids = (
            top_k_ids(self._scores[None], min(alternatives, logits.shape[-1]))[0] if alternatives else None
        )
        self._best = None if self._ids is None else self._scores[self._ids]

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays that must be evaluated before `logprobs_of` is called."""
        return [array for array in (self._scores, self._chosen, self._ids, self._best) if array is not None]

    def logprobs_of(self, token: int) -> TokenLogprobs:
        """Return the log-probability of `token` and its alternatives.

        `token` may be a forced one instead of the sampled one. Alternatives of probability 0 are left out:
        JSON has no number for their score.
        """
        chosen = self._chosen if token == self._sampled.item() else self._scores[token]
        return TokenLogprobs(ScoredToken(token, cast("float", chosen.item())), self._alternatives())

    def _alternatives(self) -> tuple[ScoredToken, ...]:
        if self._ids is None or self._best is None:
            return ()
        pairs = zip(
            cast("list[int]", self._ids.tolist()), cast("list[float]", self._best.tolist()), strict=True
        )
        best = [ScoredToken(token, score) for token, score in pairs if score > float("-inf")]
        return tuple(sorted(best, key=lambda scored: -scored.logprob))
