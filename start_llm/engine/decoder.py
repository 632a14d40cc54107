"""All decoding sequences, in groups."""

from collections.abc import Mapping, Sequence

from start_llm.core.thread_owners import ENGINE, owned_by
from start_llm.engine.batch import BatchGroup, ReleasedCaches, width
from start_llm.engine.resources import EngineResources
from start_llm.engine.sequence import EngineSequence, Sampled

_CHEAP_PADDING = 2048
"""Tokens of padding that are always accepted: their KV is small beside the weights of any model."""


def may_pad(lengths: Sequence[int]) -> bool:
    """Return whether sequences of these lengths, in tokens, may share a batch, which pads all to the longest.

    Padding costs memory and time like tokens do; a second batch reads all weights again at every step.
    """
    return padding(lengths) <= max(sum(lengths) // 2, _CHEAP_PADDING)


def padding(lengths: Sequence[int]) -> int:
    """Return the padding tokens that make sequences of these lengths equally long."""
    return len(lengths) * max(lengths) - sum(lengths)


@owned_by(ENGINE)
class Decoder:
    """All decoding sequences, each alone or in a group with others of similar length.

    A network that does not batch has each in a group of its own. Every sequence of a batch counts in memory
    as long as the longest, with the largest growth.
    """

    def __init__(self, resources: EngineResources) -> None:
        self._resources = resources
        self._queued: list[EngineSequence] = []
        self._groups: list[BatchGroup] = []
        self._starting: list[EngineSequence] = []
        self._joining: BatchGroup | None = None

    @property
    def sequences(self) -> list[EngineSequence]:
        return [*self._queued, *(sequence for group in self._groups for sequence in group.sequences)]

    @property
    def groups(self) -> list[BatchGroup]:
        """The groups of decoding sequences. Each group makes its steps independently."""
        return list(self._groups)

    def contains(self, sequence: EngineSequence) -> bool:
        return sequence in self._queued or self.group_of(sequence) is not None

    @property
    def batched_bytes(self) -> int:
        """Bytes of all merged caches, padding included."""
        return sum(group.nbytes for group in self._groups)

    def end_turn(self) -> None:
        """Note that another loop computes now, whose time is not that of a step."""
        for group in self._groups:
            group.end_turn()

    def add(self, sequence: EngineSequence) -> None:
        """Queue a sequence that has been prefilled; it decodes from the next step on."""
        self._queued.append(sequence)

    def remove(self, sequence: EngineSequence) -> ReleasedCaches:
        """Remove a sequence. Its caches hold all of its tokens, or all but the last if it has not started or
        has just joined its group, or fewer if a draft was being verified.
        """
        if sequence in self._queued:
            self._queued.remove(sequence)
            return ReleasedCaches(sequence.layer_caches, len(sequence.tokens) - 1)
        group = self.group_of(sequence)
        return self.remove_from(group, [sequence])[0] if group else ReleasedCaches([], 0)

    def remove_from(self, group: BatchGroup, sequences: Sequence[EngineSequence]) -> list[ReleasedCaches]:
        """Remove sequences of one group together; see `remove`."""
        if len(group.sequences) == len(sequences):
            self._groups.remove(group)
        return group.remove(*sequences)

    def release(self, sequence: EngineSequence) -> tuple[ReleasedCaches, Sampled | None]:
        """Remove a sequence that will continue later. Return its caches and its next token.

        The token is None if it has not been computed. After the sequence has accepted it, the caches hold all
        of its tokens but this one, or fewer if a draft was being verified.
        """
        group = self.group_of(sequence)
        sampled = group.release(sequence) if group else None
        return self.remove(sequence), sampled

    def group_of(self, sequence: EngineSequence | None) -> BatchGroup | None:
        return next(
            (group for group in self._groups if any(member is sequence for member in group.sequences)), None
        )

    @property
    def queued(self) -> list[EngineSequence]:
        """The sequences that have been prefilled and decode from the next step on, in this order."""
        return list(self._queued)

    def next_to_join(self) -> tuple[list[EngineSequence], EngineSequence | None]:
        """Return the queued sequences that join one group next, and one that is in it.

        Each is to cause the least padding there. None: the sequence can join no group.
        """
        first, *others = self._queued
        group = self._group_for(first)
        if group is None:
            return [first], None
        joining = [first]
        for sequence in others:
            if self._group_for(sequence, joining, group) is not group:
                break
            joining.append(sequence)
        return joining, group.sequences[0]

    def _group_for(
        self,
        sequence: EngineSequence,
        joining: Sequence[EngineSequence] = (),
        joined: BatchGroup | None = None,
    ) -> BatchGroup | None:
        """Return the group in which a sequence causes the least padding, once others have joined theirs."""
        members = {group: [*group.sequences, *(joining if group is joined else ())] for group in self._groups}
        fitting = [candidate for candidate in members if self._may_join(sequence, candidate, members)]
        return min(
            fitting, key=lambda candidate: padding(_lengths([*members[candidate], sequence])), default=None
        )

    def join_next(self, count: int, partner: EngineSequence | None) -> None:
        """Start the first `count` queued sequences in a partner's group, or one alone. If this raises, call
        `drop_joining`.
        """
        self._starting, self._joining = self._queued[:count], self.group_of(partner)
        if self._joining:
            self._joining.join(*self._starting)
        else:
            self._groups += [BatchGroup(self._resources, sequence) for sequence in self._starting]
        self._starting, self._joining = [], None
        del self._queued[:count]

    def drop_joining(self) -> list[EngineSequence]:
        """Drop the sequences that failed to start and the group that they were joining.

        Returns all of their sequences, which have no usable caches.
        """
        sequences, self._starting = self._starting, []
        group, self._joining = self._joining, None
        del self._queued[: len(sequences)]
        others = self.drop(group) if group else []
        return [*sequences, *(sequence for sequence in others if sequence not in sequences)]

    def drop(self, group: BatchGroup) -> list[EngineSequence]:
        """Drop a group whose step has failed, if it is still there. The KV of its sequences is lost."""
        if group not in self._groups:
            return []
        self._groups.remove(group)
        group.forget_draft()
        return group.sequences

    def abandon(self) -> list[EngineSequence]:
        """Drop every sequence, and return them."""
        sequences = self.sequences
        for group in self._groups:
            group.forget_draft()
        self._queued, self._groups, self._starting, self._joining = [], [], [], None
        return sequences

    def _may_join(
        self,
        sequence: EngineSequence,
        group: BatchGroup,
        members: Mapping[BatchGroup, list[EngineSequence]],
    ) -> bool:
        sequences = [*members[group], sequence]
        if not self._resources.batches:
            return False
        if sequence.adapters != group.adapters or any(other.excluded_from_batches for other in sequences):
            return False
        if not may_pad(_lengths(sequences)):
            return False
        others = [batch for other, batch in members.items() if other is not group]
        widths = [[width(batch)] * len(batch) for batch in (sequences, *others)]
        return self._resources.admission.fits([tokens for batch in widths for tokens in batch])


def _lengths(sequences: Sequence[EngineSequence]) -> list[int]:
    return [len(sequence.tokens) for sequence in sequences]
