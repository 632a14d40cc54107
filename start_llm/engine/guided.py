"""Mask the logits of a reply with structured output. Everything here runs on the engine thread."""

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from start_llm.core.engine_request import Guide
from start_llm.core.errors import ConstraintViolated
from start_llm.core.thread_owners import ENGINE, owned_by

_MASKED = float("-inf")


@owned_by(ENGINE)
class GuidedLogits:
    """A logits processor that keeps the tokens that a guide allows. It must be the last one of its sequence.

    The guide has to know the token that was fed last, so this processor waits until that token is sampled;
    nothing else in a step waits. The network has been submitted by then (`engine.batch.BatchGroup`), so the
    device computes the logits while the guide makes the mask.

    A violated constraint ends only its own sequence: others may share the step, so it is not raised.

    Attributes:
        known: tokens of prompt and reply that the guide has seen, or is not asked about.
        lost: why the reply cannot continue; empty while it can.
    """

    def __init__(self, guide: Guide, prompt_length: int) -> None:
        self._guide = guide
        self.known = prompt_length
        self.lost = ""
        self._certain = prompt_length

    def is_at(self, length: int) -> bool:
        """Return whether a sequence of this length can continue: the guide has seen no token beyond it."""
        return self.known <= length

    def is_lost_at(self, length: int) -> bool:
        """Return whether the reply cannot continue after so many tokens: a guide may be lost in a draft."""
        return bool(self.lost) and self.known <= length

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Mask the logits; see `engine.sampler.LogitsProcessor`."""
        if self.lost:
            return logits
        try:
            self._advance(cast("list[int]", tokens[self.known :].tolist()))
            allowed = mx.array(cast("Any", memoryview(self._guide.allowed())))
        except ConstraintViolated as error:
            self.lost = str(error)
            return logits
        return mx.where(allowed[: logits.shape[-1]] > 0, logits, _MASKED)

    def _advance(self, new: Sequence[int]) -> None:
        self.known += len(new)
        if new:
            self._guide.advance(new)

    def foresee(self, new: Sequence[int]) -> Sequence[int]:
        """Accept new tokens, and return those of the only text that can come next; empty if several can."""
        if self.lost:
            return ()
        try:
            self._advance(new)
        except ConstraintViolated as error:
            self.lost = str(error)
            return ()
        return self._guide.forced()

    def count_allowed(self, drafted: Sequence[int]) -> int:
        """Return how many drafted tokens the guide would allow."""
        self._certain = self.known
        return 0 if self.lost else self._guide.count_allowed(drafted)

    def go_back(self, length: int) -> None:
        """Forget drafted tokens that are not the reply's: all after the first `length` ones.

        A guide that was lost after these is no longer.
        """
        if self.known > length:
            self._guide.go_back(length - self._certain)
            self.known, self.lost = length, ""
