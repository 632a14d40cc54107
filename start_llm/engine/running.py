"""The sequences that one loop runs: prompts that are computed, and replies that are decoded."""

from collections.abc import Collection

from start_llm.cache.pages import SequenceCache
from start_llm.core.thread_owners import ENGINE, owned_by
from start_llm.engine.decoder import Decoder
from start_llm.engine.generation import Generation
from start_llm.engine.prefill import Prefill
from start_llm.engine.resources import EngineResources
from start_llm.engine.sequence import EngineSequence


@owned_by(ENGINE)
class RunningSequences:
    """What the planner reads, and the executor and `engine.recovery` change.

    Attributes:
        starting: a request that is taken from the schedule, and not prefilled yet.
        starting_cache: what was restored for it.
        prefills: the prompts that are being computed: one, or several short ones together.
        decoder: the replies that are being decoded.
    """

    def __init__(self, resources: EngineResources) -> None:
        self._cache = resources.cache
        self.starting: Generation | None = None
        self.starting_cache: SequenceCache | None = None
        self.prefills: list[Prefill] = []
        self.decoder = Decoder(resources)

    @property
    def sequences(self) -> list[EngineSequence]:
        return [*(prefill.sequence for prefill in self.prefills), *self.decoder.sequences]

    def note_batched_bytes(self) -> None:
        """Tell the prompt cache how much memory merged caches take, which it does not see otherwise."""
        self._cache.batched_bytes = self.decoder.batched_bytes

    def numbered(self, number: int | None) -> EngineSequence | None:
        """Return the sequence of a request, if it runs."""
        return next((sequence for sequence in self.sequences if sequence.number == number), None)

    def prefill_of(self, number: int) -> Prefill:
        """Return how far the prompt of a request is computed.

        Raises:
            ValueError: it is not being prefilled.
        """
        prefill = next(
            (candidate for candidate in self.prefills if candidate.sequence.number == number), None
        )
        if prefill is None:
            raise ValueError(f"request {number} is not being prefilled")
        return prefill

    def take_prefills(self, numbers: Collection[int] | None = None) -> list[EngineSequence]:
        """Take prompts out of prefill: those of these requests, or all."""
        sequences = [prefill.sequence for prefill in self.prefills]
        taken = [sequence for sequence in sequences if numbers is None or sequence.number in numbers]
        self.prefills = [prefill for prefill in self.prefills if prefill.sequence not in taken]
        return taken
