"""Batched decoding: each step computes one token for every sequence of a group, or several for a single one.

A sequence that waits to start holds the KV of `tokens[:-1]`: its first step feeds the last token. A sequence
that is preempted returns to that state once it has accepted the token that was already sampled for it. If a
draft was being verified, it may hold the KV of fewer tokens.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import mlx.core as mx

from start_llm.cache.rollback import RollbackPoint, can_roll_back
from start_llm.core.common_beginning import common_length
from start_llm.core.thread_owners import ENGINE, owned_by
from start_llm.engine import merging
from start_llm.engine.admission import planned_tokens
from start_llm.engine.draft_index import Draft
from start_llm.engine.forward_pass import ForwardPasses, LaunchedStep
from start_llm.engine.resources import EngineResources
from start_llm.engine.scores import Scores
from start_llm.engine.sequence import EngineSequence, Sampled

_STEPS_BETWEEN_CLEARS = 256


class ReleasedCaches(NamedTuple):
    """The caches of a removed sequence, and the number of its tokens that they hold."""

    caches: list[Any]
    tokens: int


class _Verified(NamedTuple):
    """A draft that is fed in the launched step, which verifies it.

    Attributes:
        known: the tokens before it in that step, which are the reply's.
        before: what the caches held before these.
    """

    draft: Draft
    known: list[int]
    before: RollbackPoint

    @property
    def fed(self) -> int:
        return len(self.known) + len(self.draft.tokens)


@owned_by(ENGINE)
class BatchGroup:
    """Sequences that decode in one forward pass.

    The device computes the next step while the caller handles the tokens of the current one.

    A single sequence keeps its own caches; the caches of several are merged. A sequence that joins is
    appended at the end and is fed from the next step on.

    A single sequence may be fed a draft, which is verified in the same forward pass: as long as its own
    sampler picks the drafted tokens, they are the reply. Afterwards its caches may hold fewer tokens than it
    has: what they could not keep is carried into the next pass.

    Attributes:
        adapters: all sequences of the group have the same.
        is_broken: a sequence was taken out by half, so the caches of the others may be, too.
    """

    def __init__(self, resources: EngineResources, sequence: EngineSequence) -> None:
        self._resources = resources
        self._gain = resources.gain if can_roll_back(sequence.layer_caches) else None
        self.adapters = sequence.adapters
        self.is_broken = False
        self._sequences = [sequence]
        self._held = [len(sequence.tokens) - 1]  # tokens in their caches, with those of the launched step
        self._caches: list[Any] = sequence.layer_caches
        self._passes = ForwardPasses(resources, self.adapters)
        self._steps = 0
        self._ended_at: float | None = None  # when the last step did, in seconds
        self._verified: _Verified | None = None
        self._carried: list[int] = []  # accepted tokens that the caches do not hold
        self._next: LaunchedStep | None = None
        self._next = self._launch(_last_tokens([sequence])[:, None])

    @property
    def sequences(self) -> list[EngineSequence]:
        return list(self._sequences)

    @property
    def nbytes(self) -> int:
        """Bytes of the merged caches, padding included. A single sequence's cache counts its own: then 0."""
        return sum(cache.nbytes for cache in self._caches) if len(self._sequences) > 1 else 0

    def step(self, draft_lengths: Sequence[int] = ()) -> list[Sampled]:
        """Return the next tokens, one for each sequence, or more of a single one. Launch the next step.

        Sequences that have just joined are fed now and return their first token from the next step.

        Args:
            draft_lengths: tokens to draft for a single sequence, by class of match; see `engine.draft_index`.
        """
        self._steps += 1
        fed, expected = self._next.fed if self._next else 0, self._expected(draft_lengths)
        is_drafting = self._verified or (draft_lengths and self._may_draft(expected, draft_lengths))
        sampled = self._step_alone(draft_lengths) if is_drafting else self._step()
        self._note(fed, expected, sampled)
        if self._steps % _STEPS_BETWEEN_CLEARS == 0:
            mx.clear_cache()
            self._plan_growth()
        return sampled

    def _step(self) -> list[Sampled]:
        """Launch the next step before the tokens of the current one are known."""
        sampled, chances, scores, _ = self._take_next()
        stepped, newcomers = self._sequences[: len(scores)], self._sequences[len(scores) :]
        tokens = mx.concatenate([sampled, _last_tokens(newcomers)]) if newcomers else sampled
        self._next = self._launch(tokens[:, None])
        results = zip(stepped, cast("list[int]", sampled.tolist()), _numbers(chances), scores, strict=True)
        return [_sampled(*each) for each in results]

    def _may_draft(self, expected: Draft | None, draft_lengths: Sequence[int]) -> bool:
        """Return whether waiting for the next token is worth it. A guide waits for it in any case."""
        if self._gain is None or not self._next or len(self._sequences) > 1:
            return False
        return self._sequences[0].is_guided or bool(expected and draft_lengths[expected.match])

    def _expected(self, draft_lengths: Sequence[int]) -> Draft | None:
        """Return the token that the launched step is expected to give, if it gives a single one."""
        if self._gain is None or self._verified or not self._next or len(self._sequences) > 1:
            return None
        return self._sequences[0].draft(1) if draft_lengths or self._gain.can_pay() else None

    def _note(self, fed: int, expected: Draft | None, sampled: Sequence[Sampled]) -> None:
        """Record how long the step took, if nothing came between, and whether its token was expected."""
        if self._gain is None or len(self._sequences) > 1:
            self._ended_at = None
            return
        now = time.perf_counter()
        if self._ended_at is not None and fed:
            self._gain.times.note(fed, now - self._ended_at)
        self._ended_at = now
        if expected:
            self._gain.note(expected.match, 1, int(expected.tokens[0] == sampled[0].token))

    def _step_alone(self, draft_lengths: Sequence[int]) -> list[Sampled]:
        """Wait for the tokens of the launched step. Feed the last with a draft after it, if there is one."""
        verified, self._verified = self._verified, None
        sampled = self._accepted(verified, self._next) if verified and self._next else self._only()
        new = [result.token for result in sampled]
        draft = self._sequences[0].draft_after(new, draft_lengths) if draft_lengths else None
        known, self._carried = [*self._carried, new[-1]], []
        before = RollbackPoint(self._caches) if draft else None
        drafted = draft.tokens if draft else ()
        self._next = self._launch(mx.array([[*known, *drafted]], dtype=mx.uint32), drafted)
        self._verified = _Verified(draft, known, before) if draft and before else None
        return sampled

    def _only(self) -> list[Sampled]:
        """Return the token of a step without a draft."""
        tokens, chances, scores, _ = self._take_next()
        token, chance = cast("int", tokens.item()), cast("float", chances.item())
        return [_sampled(self._sequences[0], token, chance, scores[0])]

    def _accepted(self, verified: _Verified, launched: LaunchedStep) -> list[Sampled]:
        """Return the drafted tokens that the sequence's own sampler picks, and the one that it picks then.

        No draft goes beyond where tokens may be forced.
        """
        sequence, drafted = self._sequences[0], verified.draft.tokens
        picked, chances = cast("list[int]", launched.tokens.tolist()), _numbers(launched.chances)
        accepted = common_length(drafted, tuple(picked))
        self._keep(verified, accepted)
        self._passes.note_accepted(sequence, drafted[:accepted])
        if self._gain:
            self._gain.note_verified(verified.draft.match, len(drafted), accepted)
        results = zip(picked[: accepted + 1], chances, launched.scores, strict=False)
        return [
            _sampled(sequence, *each)._replace(is_drafted=place < accepted)
            for place, each in enumerate(results)
        ]

    def _keep(self, verified: _Verified, accepted: int) -> None:
        """Take the caches back to the accepted tokens of a draft, or as far as they can be."""
        drafted = verified.draft.tokens
        if accepted == len(drafted):
            return
        self._sequences[0].forget_draft(accepted)
        if verified.before.can_keep:
            verified.before.keep(len(verified.known) + accepted)
            self._held[0] -= len(drafted) - accepted
        else:
            verified.before.keep(0)
            self._held[0] -= verified.fed
            self._carried = [*verified.known, *drafted[:accepted]]

    def _give_up_draft(self) -> None:
        """Go back to before the draft that is being verified, as if nothing had been launched."""
        if self._verified:
            self._verified.before.keep(0)
            self._held[0] -= self._verified.fed
            self._sequences[0].forget_draft()
            self._verified = self._next = None
            self._passes.forget(self._sequences[0])

    def forget_draft(self) -> None:
        """Take the guide of a sequence whose draft is being verified back to its tokens."""
        if self._verified:
            self._sequences[0].forget_draft()

    def end_turn(self) -> None:
        """Note that the next step does not follow at once: how long it takes is not recorded."""
        self._ended_at = None

    def wait(self) -> None:
        """Wait until the launched step has been computed."""
        self.end_turn()
        if self._next:
            mx.eval(self._next.tokens)

    def join(self, *sequences: EngineSequence) -> None:
        """Add sequences. If this raises, neither they nor the others of the group have usable caches."""
        caches = [sequence.layer_caches for sequence in sequences]
        shifts = [sequence.images.shift for sequence in sequences]
        if len(self._sequences) == 1:
            self._settle()
            lone = self._sequences[0]
            self._caches = merging.merge([self._caches, *caches], [lone.images.shift, *shifts])
            self._lend(lone)
        else:
            merging.extend(self._caches, caches, shifts)
        self._sequences += sequences
        self._held += [len(sequence.tokens) - 1 for sequence in sequences]
        for sequence in sequences:
            self._lend(sequence)
        self._plan_growth()
        self._passes.regroup()

    def _settle(self) -> None:
        """Give up a draft that is being verified, so that the caches hold all tokens but the last."""
        if not self._verified:
            return
        self._give_up_draft()
        missing = self._sequences[0].tokens[self._held[0] : -1]
        if missing:
            self._passes.feed(self._sequences, self._caches, mx.array([missing], dtype=mx.uint32))
            self._held[0] += len(missing)

    def _plan_growth(self) -> None:
        """Reserve room in the merged caches for the tokens that memory admission has planned."""
        if len(self._sequences) > 1:
            merging.grow_by(self._caches, growth(self._sequences))
            for sequence in self._sequences:
                sequence.width = width(self._sequences)

    def _lend(self, sequence: EngineSequence) -> None:
        sequence.layer_caches = []
        sequence.seq_cache.move_to_batch(partial(self._copy_of, sequence))

    def _copy_of(self, sequence: EngineSequence) -> list[Any]:
        """Return lazy copies of the sequence's caches, with every token that has been fed."""
        return merging.copy_of(self._caches, self._place(sequence))

    def _place(self, sequence: EngineSequence) -> int:
        return next(place for place, member in enumerate(self._sequences) if member is sequence)

    def release(self, sequence: EngineSequence) -> Sampled | None:
        """Return the token that has already been computed for a sequence that is about to be removed.

        After the sequence has accepted it, the caches hold all of its tokens but this one. None if the
        sequence has just joined, so that nothing is computed, or if a draft is being verified.
        """
        place = self._place(sequence)
        if self._verified or self._next is None or place >= len(self._next.scores):
            return None
        scores = self._next.scores[place]
        if sequence.forced_tokens:
            return _sampled(sequence, sequence.forced_tokens[0], 1.0, scores)
        token = cast("int", self._next.tokens[place].item())
        return _sampled(sequence, token, cast("float", self._next.chances[place].item()), scores)

    def remove(self, *sequences: EngineSequence) -> list[ReleasedCaches]:
        """Remove sequences. The caches of each hold all of its tokens, or all but the last if it has just
        joined, or fewer if a draft was being verified.

        If this raises, no sequence of the group has usable caches: the group is broken.
        """
        self.is_broken = True
        self._give_up_draft()
        places = [self._place(sequence) for sequence in sequences]
        staying = [place for place in range(len(self._sequences)) if place not in places]
        released = [
            ReleasedCaches(caches, self._held[place])
            for caches, place in zip(self._take_out(places, staying), places, strict=True)
        ]
        self._sequences = [self._sequences[place] for place in staying]
        self._held = [self._held[place] for place in staying]
        self._next = self._next.without(places) if self._next else None
        self._passes.regroup()
        for sequence in sequences:
            self._passes.forget(sequence)
            sequence.width = 0
        if len(self._sequences) == 1:
            self._sequences[0].take_caches(self._caches)
        self._plan_growth()
        self.is_broken = False
        return released

    def _take_out(self, places: list[int], staying: list[int]) -> list[list[Any]]:
        """Return the caches of the sequences at these places. The only one that stays gets unmerged caches
        again, which are faster.
        """
        count = len(self._sequences)
        if count == 1:
            return [self._caches]
        if len(staying) > 1:
            return merging.take_out(self._caches, places, count)
        taken = merging.take_out(self._caches, [*places, *staying], count)
        if staying:
            self._caches = taken.pop()
        return taken

    def _take_next(self) -> LaunchedStep:
        """Return the launched step, with forced tokens in place of sampled ones. None has been fed yet."""
        if self._next is None:
            return LaunchedStep(mx.array([], dtype=mx.uint32), mx.array([]), [])
        return self._next.with_forced_tokens(self._sequences)

    def _launch(self, tokens: mx.array, drafted: Sequence[int] = ()) -> LaunchedStep:
        """Feed `tokens` [sequences, n], and sample what comes next; see `ForwardPasses.launch`."""
        held = [count + tokens.shape[1] for count in self._held]
        launched = self._passes.launch(self._sequences, self._caches, tokens, held, drafted)
        self._held = held
        return launched


def _last_tokens(sequences: Sequence[EngineSequence]) -> mx.array:
    """Return the last token of each sequence, which it is fed next."""
    return mx.array([sequence.tokens[-1] for sequence in sequences], dtype=mx.uint32)


def _sampled(sequence: EngineSequence, token: int, chance: float, scores: Scores | None) -> Sampled:
    return Sampled(
        sequence, token, sequence.chooser.surprisal(chance), scores.logprobs_of(token) if scores else None
    )


def _numbers(array: mx.array) -> list[float]:
    return cast("list[float]", array.tolist())


def growth(sequences: Sequence[EngineSequence]) -> int:
    """Return the most tokens for which any of these sequences still has planned memory; at least 1."""
    return max(
        1,
        *(
            planned_tokens(sequence.generation.request, len(sequence.tokens)) - len(sequence.tokens)
            for sequence in sequences
        ),
    )


def width(sequences: Sequence[EngineSequence]) -> int:
    """Return the tokens that each of these sequences occupies in a batch until growth is planned again."""
    return max(len(sequence.tokens) for sequence in sequences) + growth(sequences)
