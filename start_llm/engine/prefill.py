"""Prefill of one prompt, chunk by chunk."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from start_llm.core.events import Prefilling
from start_llm.engine.sequence import EngineSequence


class Prefill:
    """Computes a sequence's prompt into its caches, all but the last token.

    The first decode step computes the last token. So there is always a token to sample from (lesson 3).

    Args:
        checkpoint_positions: positions at which a chunk has to end.
    """

    def __init__(
        self, network: Any, sequence: EngineSequence, checkpoint_positions: tuple[int, ...] = ()
    ) -> None:
        self._network = network
        self._checkpoint_positions = checkpoint_positions
        self.sequence = sequence
        self.done = len(sequence.seq_cache.tokens)

    @property
    def total(self) -> int:
        return len(self.sequence.tokens)

    @property
    def remaining(self) -> int:
        """Tokens still to compute before the first decode step."""
        return self.total - 1 - self.done

    @property
    def is_complete(self) -> bool:
        return self.remaining == 0

    @property
    def is_at_checkpoint(self) -> bool:
        return self.done in self._checkpoint_positions

    def step(self, most: int) -> int:
        """Compute one chunk of at most `most` tokens and report progress. Returns its length."""
        next_stop = next((stop for stop in self._checkpoint_positions if stop > self.done), self.total)
        end = min(self.done + most, self.total - 1, next_stop)
        if end == self.done:
            return 0
        chunk = mx.array([self.sequence.tokens[self.done : end]])
        self._network(chunk, cache=self.sequence.layer_caches)
        mx.eval([layer.state for layer in self.sequence.layer_caches])
        mx.clear_cache()
        computed = end - self.done
        self.done = end
        if not self.sequence.has_begun:
            self.sequence.generation.emit(Prefilling(self.done, self.total))
        return computed
