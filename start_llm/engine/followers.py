"""Other processes that compute the same network, and do what this one has decided (ADR 26)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from start_llm.cache.disk.shared_restore import RestorePeers
from start_llm.engine.generation import Generation
from start_llm.engine.step_plan import StepPart

type Agreement = Callable[[mx.array, mx.array], mx.array]
"""Returns the ids that all ranks take, of logits and the ids that were sampled from them."""


def as_sampled(logits: mx.array, ids: mx.array) -> mx.array:
    """Return the ids as they are: there is nobody to agree with."""
    del logits
    return ids


class ExecutorState(NamedTuple):
    """Numbers that differ where two executors have done different things.

    Attributes:
        running: requests that run.
        tokens: of their prompts and replies.
        computed: tokens of prompts that are being prefilled, as far as they are in caches.
        free_bytes: of the prompt cache.
        image_bytes: of images that are kept as the vision tower has seen them.
    """

    running: int
    tokens: int
    computed: int
    free_bytes: int
    image_bytes: int


class Followers(RestorePeers):
    """The other ranks. They get everything in the order in which it is done here.

    This class is for a process that computes alone.
    """

    def on_news(self, notify: Callable[[], object]) -> None:
        """Call this, on any thread, when they have read something that a prompt here waits for."""

    def take_request(self, generation: Generation) -> None:
        """Send a request that has its number."""

    def take_part(self, part: StepPart, at: float, state: Callable[[], ExecutorState]) -> None:
        """Send a part of a step that is about to be done here.

        Args:
            at: the plan's time.
            state: returns what the executor has before the part. Theirs must have the same.
        """

    def note_failure(self) -> None:
        """End the service: a part has failed here, and what was cleaned up the others still have."""

    def take_trimmed(self, arrays: int) -> None:
        """Tell how many arrays of the prompt cache were trimmed here."""

    def take_budget(self, nbytes: int, at: float) -> None:
        """Tell the budget of the prompt cache from this time of the plan on."""

    def flush(self, patience_s: float) -> None:
        """Let them write what is not on their disks yet, for so many seconds at most."""
