"""Keeping a reply in the form that it must have. Everything here runs on the engine thread."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx

from start_llm.core.errors import GuideLost
from start_llm.core.job import Guide

_MASKED = float("-inf")


class GuidedLogits:
    """A logits processor that leaves what a guide allows; the last of its row, so that nothing undoes it.

    The guide has to know the token that was fed last. So this waits until that is sampled, which nothing
    else in a step does. The network has been submitted by then (`engine.batch.Group`), so that the device
    computes the logits while the mask is made.

    A guide that is lost loses its own row alone: others may be in the same step, so nothing is raised here.

    Attributes:
        lost: why the reply cannot go on; empty while it can.
    """

    def __init__(self, guide: Guide, prompt_length: int) -> None:
        self._guide = guide
        self._known = prompt_length
        self.lost = ""

    def is_at(self, length: int) -> bool:
        """Whether a sequence of this length can go on: the guide has seen no token that it does not have."""
        return self._known <= length

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """See `engine.sampling.LogitsProcessor`."""
        if self.lost:
            return logits
        new = cast("list[int]", tokens[self._known :].tolist())
        self._known += len(new)
        try:
            if new:
                self._guide.advance(new)
            allowed = mx.array(cast("Any", memoryview(self._guide.allowed())))
        except GuideLost as error:
            self.lost = str(error)
            return logits
        return mx.where(allowed[: logits.shape[-1]] > 0, logits, _MASKED)
