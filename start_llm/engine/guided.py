"""Mask the logits of a reply with structured output. Everything here runs on the engine thread."""

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

    A guide that fails ends only its own sequence: others may share the step, so nothing is raised here.

    Attributes:
        lost: why the reply cannot continue; empty while it can.
    """

    def __init__(self, guide: Guide, prompt_length: int) -> None:
        self._guide = guide
        self._known = prompt_length
        self.lost = ""

    def is_at(self, length: int) -> bool:
        """Return whether a sequence of this length can continue: the guide has seen no token beyond it."""
        return self._known <= length

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Mask the logits; see `engine.sampler.LogitsProcessor`."""
        if self.lost:
            return logits
        new = cast("list[int]", tokens[self._known :].tolist())
        self._known += len(new)
        try:
            if new:
                self._guide.advance(new)
            allowed = mx.array(cast("Any", memoryview(self._guide.allowed())))
        except ConstraintViolated as error:
            self.lost = str(error)
            return logits
        return mx.where(allowed[: logits.shape[-1]] > 0, logits, _MASKED)
