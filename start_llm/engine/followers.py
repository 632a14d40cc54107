"""Other processes that compute the same network, and do what this one has decided (ADR 26)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx

if TYPE_CHECKING:
    from start_llm.engine.executor import StepExecutor
    from start_llm.engine.generation import Generation
    from start_llm.engine.step_plan import StepPart

type Agreement = Callable[[mx.array, mx.array], mx.array]
"""Returns the ids that all ranks take, of logits and the ids that were sampled from them."""


def as_sampled(logits: mx.array, ids: mx.array) -> mx.array:
    """Return the ids as they are: there is nobody to agree with."""
    del logits
    return ids


class Followers(Protocol):
    """The other ranks. They get everything in the order in which it is done here.

    Attributes:
        are_there: there are some.
    """

    are_there: bool

    def take_request(self, generation: Generation) -> None:
        """Send a request that has its number."""
        ...

    def executing(self, part: StepPart, at: float, executor: StepExecutor) -> AbstractContextManager[None]:
        """Send a part of a step, which is done here in the block.

        Args:
            at: the plan's time.
            executor: as it is before the part. Theirs must be the same.
        """
        ...

    def take_trimmed(self, arrays: int) -> None:
        """Tell how many arrays of the prompt cache were trimmed here."""
        ...

    def take_budget(self, nbytes: int, at: float) -> None:
        """Tell the budget of the prompt cache from this time of the plan on."""
        ...


class NoFollowers:
    """This process computes alone."""

    are_there = False

    def take_request(self, generation: Generation) -> None:
        """Send it to nobody."""

    def executing(self, part: StepPart, at: float, executor: StepExecutor) -> AbstractContextManager[None]:
        """Send it to nobody."""
        del part, at, executor
        return nullcontext()

    def take_trimmed(self, arrays: int) -> None:
        """Tell nobody."""

    def take_budget(self, nbytes: int, at: float) -> None:
        """Tell nobody."""
