"""Memory admission: whether a sequence fits into memory now, later or never, and what has to be freed."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from start_llm.core.engine_request import EngineRequest
from start_llm.core.sequence_cost import SequenceCost
from start_llm.engine.sequence import EngineSequence

_REPLY = 1024
"""Reply tokens that a sequence must have memory for before it starts, since `max_tokens` predicts little."""
_ANY = 2**62


@dataclass(slots=True)
class Admission:
    """The memory for running sequences' KV caches, and checks against it.

    Attributes:
        usable_bytes: memory that remains after the weights and the activations. It changes when another model
            is loaded or unloaded.
        cost: KV cache bytes of a sequence by its length.
    """

    usable_bytes: int = _ANY
    cost: SequenceCost = field(default_factory=SequenceCost)

    @property
    def longest(self) -> int:
        """The longest sequence, in tokens, that fits into memory if it runs alone."""
        return self.cost.tokens_in(self.usable_bytes)

    def has_room(
        self,
        sequences: Sequence[EngineSequence],
        request: EngineRequest,
        tokens: int,
        reserved: Sequence[int] = (),
    ) -> bool:
        """Return whether a sequence of `tokens` tokens can run beside these sequences.

        True if no other sequence runs: a request longer than `longest` is refused earlier.

        Args:
            reserved: lengths of sequences that have memory and do not run yet, in tokens.
        """
        if not (sequences or reserved):
            return True
        planned = [
            max(planned_tokens(sequence.generation.request, len(sequence.tokens)), sequence.width)
            for sequence in sequences
        ]
        return self.fits([*planned, *reserved, planned_tokens(request, tokens)])

    def fits(self, lengths: Iterable[int]) -> bool:
        """Return whether sequences of these lengths, in tokens, fit into memory."""
        return self.bytes_for(lengths) <= self.usable_bytes

    def bytes_for(self, lengths: Iterable[int]) -> int:
        """Return the KV cache bytes of sequences of these lengths, in tokens."""
        return sum(self.cost.bytes_of(tokens) for tokens in lengths)


def planned_tokens(request: EngineRequest, tokens: int) -> int:
    """Return the length, in tokens, that a sequence of `tokens` tokens must have memory for to start."""
    return min(len(request.prompt) + request.max_tokens, tokens + _REPLY)


def shortage(budget_bytes: int, lacking_bytes: Callable[[], int]) -> int:
    """Return the bytes to free: those beyond the budget, or those that other processes lack; 0 if none.

    MLX's buffer cache is cleared first, which may be enough, so that nothing has to be evicted.

    Args:
        lacking_bytes: returns what other processes lack; see `models.device`.
    """
    missing = _missing(budget_bytes, lacking_bytes)
    if missing and mx.get_cache_memory():
        mx.clear_cache()
        missing = _missing(budget_bytes, lacking_bytes)
    return missing


def _missing(budget_bytes: int, lacking_bytes: Callable[[], int]) -> int:
    ours = mx.get_active_memory() + mx.get_cache_memory() - budget_bytes
    return max(ours, lacking_bytes(), 0)
