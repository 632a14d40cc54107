"""Apply the logits processors of sequences: penalties, biases and the masks of guides."""

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.cache import TokenBuffer

from start_llm.core.thread_owners import ENGINE, owned_by
from start_llm.engine.sequence import EngineSequence


@owned_by(ENGINE)
class ProcessedLogits:
    """Logits of the sequences of a group as they are sampled from.

    Processors read the tokens before the logits. Those of a sequence are kept in a buffer, which holds what
    was fed to the network and never what a draft had wrong.
    """

    def __init__(self) -> None:
        self._contexts: dict[int, TokenBuffer] = {}

    def process(
        self,
        sequences: Sequence[EngineSequence],
        tokens: mx.array,
        logits: mx.array,
        drafted: Sequence[int] = (),
    ) -> mx.array:
        """Return logits [sequences, vocabulary] after the processors of each sequence.

        Args:
            tokens: that were fed [sequences], without a draft.
            drafted: tokens of a single sequence; then logits are [1 + drafted, vocabulary].
        """
        if not any(sequence.processors for sequence in sequences):
            return logits
        if any(sequence.is_guided for sequence in sequences):
            # A guide waits for the fed token. Submit the network first, so that the device computes it
            # meanwhile.
            mx.async_eval(logits)
        if drafted:
            return _after_draft(sequences[0], self._context(sequences[0], tokens), logits, drafted)
        return mx.concatenate(
            [
                self._of(sequence, tokens[place : place + 1], logits[place : place + 1])
                for place, sequence in enumerate(sequences)
            ]
        )

    def note_accepted(self, sequence: EngineSequence, drafted: Sequence[int]) -> None:
        """Note drafted tokens that became the sequence's."""
        if drafted and id(sequence) in self._contexts:
            self._contexts[id(sequence)].update_and_fetch(mx.array(list(drafted)))

    def forget(self, sequence: EngineSequence) -> None:
        """Forget the tokens of a sequence: it leaves, or goes back."""
        self._contexts.pop(id(sequence), None)

    def _of(self, sequence: EngineSequence, token: mx.array, logits: mx.array) -> mx.array:
        if not sequence.processors:
            return logits
        return _processed(sequence, self._context(sequence, token), logits)

    def _context(self, sequence: EngineSequence, token: mx.array) -> mx.array:
        """Return the tokens of a sequence up to the fed one, which is new."""
        if id(sequence) not in self._contexts:
            self._contexts[id(sequence)] = TokenBuffer(sequence.network_ids[:-1])
        return self._contexts[id(sequence)].update_and_fetch(token)


def _after_draft(
    sequence: EngineSequence, context: mx.array, logits: mx.array, drafted: Sequence[int]
) -> mx.array:
    """Return the logits after the fed token and after each drafted one, which see the draft before them."""
    rows: list[mx.array] = []
    for row in range(len(drafted) + 1):
        before = mx.array(list(drafted[:row]), dtype=context.dtype)
        seen = mx.concatenate([context, before]) if row else context
        rows.append(_processed(sequence, seen, logits[row : row + 1]))
    return mx.concatenate(rows)


def _processed(sequence: EngineSequence, context: mx.array, logits: mx.array) -> mx.array:
    for processor in sequence.processors:
        logits = processor(context, logits)
    return logits
