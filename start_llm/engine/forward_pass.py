"""One forward pass for the sequences of a group, and the tokens that are sampled from it."""

from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from start_llm.core.adapters import AdapterStack
from start_llm.core.thread_owners import ENGINE, owned_by
from start_llm.engine.processed_logits import ProcessedLogits
from start_llm.engine.resources import EngineResources
from start_llm.engine.sampler import BatchSampler
from start_llm.engine.scores import Scores
from start_llm.engine.sequence import EngineSequence
from start_llm.engine.shifted_cache import shifted


class LaunchedStep(NamedTuple):
    """A step that has been submitted to the device.

    Attributes:
        tokens: sampled ids [sequences]; with a draft, one for the token before it and for each of its own.
        chances: probabilities of these ids.
        scores: log-probabilities, for the sequences that request them.
        fed: tokens of each sequence that the step feeds.
    """

    tokens: mx.array
    chances: mx.array
    scores: list[Scores | None]
    fed: int = 1

    def with_forced_tokens(self, sequences: Sequence[EngineSequence]) -> "LaunchedStep":
        """Return it with forced tokens in place of sampled ones. None of them has been fed yet."""
        sequences = sequences[: len(self.scores)]
        if not any(sequence.forced_tokens for sequence in sequences):
            return self
        is_dictated = mx.array([bool(sequence.forced_tokens) for sequence in sequences])
        forced_tokens = [sequence.forced_tokens[0] if sequence.forced_tokens else 0 for sequence in sequences]
        tokens = mx.where(is_dictated, mx.array(forced_tokens, dtype=mx.uint32), self.tokens)
        return self._replace(tokens=tokens, chances=mx.where(is_dictated, 1, self.chances))

    def without(self, places: Container[int]) -> "LaunchedStep | None":
        """Return it without the sequences at these places; None if no other one has a token in it."""
        kept = [place for place in range(len(self.scores)) if place not in places]
        if len(kept) == len(self.scores):
            return self
        if not kept:
            return None
        scores = [self.scores[place] for place in kept]
        return LaunchedStep(self.tokens[mx.array(kept)], self.chances[mx.array(kept)], scores)


@owned_by(ENGINE)
class ForwardPasses:
    """Makes the forward passes of a group.

    Args:
        adapters: all sequences of the group have the same.
    """

    def __init__(self, resources: EngineResources, adapters: AdapterStack) -> None:
        self._resources = resources
        self._adapters = adapters
        self._logits = ProcessedLogits()
        self._samplers: dict[int, BatchSampler] = {}

    def feed(self, sequences: Sequence[EngineSequence], caches: list[Any], tokens: mx.array) -> mx.array:
        """Feed `tokens` [sequences, n]. Returns logits [sequences, n, vocabulary], not computed yet.

        Args:
            caches: of the network's layers; merged ones have the sequences' positions themselves.
        """
        is_lone = len(sequences) == 1
        positioned = shifted(caches, sequences[0].images.shift) if is_lone else caches
        self._resources.mount(self._adapters)
        return self._resources.network(tokens, cache=positioned)

    def launch(
        self,
        sequences: Sequence[EngineSequence],
        caches: list[Any],
        tokens: mx.array,
        held: Sequence[int],
        drafted: Sequence[int] = (),
    ) -> LaunchedStep:
        """Feed `tokens` [sequences, n], and sample what comes after the last one of each sequence.

        Waits only for the tokens that guided sequences must know.

        Args:
            held: tokens of each sequence that the caches hold then.
            drafted: the last ones of a single sequence's; what comes before them is sampled too.
        """
        rows = len(drafted) + 1
        computed = self.feed(sequences, caches, tokens)
        logits = computed[0, -rows:, :] if drafted else computed[:, -1, :]
        logits = self._logits.process(sequences, tokens[:, -rows], logits, drafted)
        positions = [*range(held[0] - len(drafted), held[0]), *held]
        sampled, chances = self._sampler(sequences, rows, logits.shape[-1])(logits, positions)
        sampled = self._resources.agree(computed, sampled)
        scored = [sequences[0]] * rows if drafted else sequences
        scores = [_scores(sequence, logits[row], sampled[row]) for row, sequence in enumerate(scored)]
        mx.async_eval(sampled, chances, [score.arrays for score in scores if score])
        return LaunchedStep(sampled, chances, scores, tokens.shape[1])

    def _sampler(self, sequences: Sequence[EngineSequence], rows: int, vocabulary: int) -> BatchSampler:
        """Return the sampler of all sequences; of a single one, for `rows` of its tokens."""
        if rows not in self._samplers:
            choosers = [sequence.chooser for sequence in sequences for _ in range(rows)]
            self._samplers[rows] = BatchSampler(choosers, vocabulary)
        return self._samplers[rows]

    def regroup(self) -> None:
        """Note that the group has other sequences from now on."""
        self._samplers.clear()

    def note_accepted(self, sequence: EngineSequence, drafted: Sequence[int]) -> None:
        """Note drafted tokens that became the sequence's."""
        self._logits.note_accepted(sequence, drafted)

    def forget(self, sequence: EngineSequence) -> None:
        """Forget the tokens of a sequence: it leaves, or goes back."""
        self._logits.forget(sequence)


def _scores(sequence: EngineSequence, logits: mx.array, sampled: mx.array) -> Scores | None:
    wanted = sequence.generation.request.top_logprobs
    return None if wanted is None else Scores(logits, sampled, wanted)
