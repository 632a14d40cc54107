"""Random requests to an engine that drafts, and what an engine without drafts and cache says to them.

Shared by `tests/engine/test_law_of_drafts.py` and `benchmarks speculation --only law`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from start_llm.core.engine_request import EngineRequest
from start_llm.core.limits import TimeLimits
from start_llm.core.sampling import Sampling
from start_llm.engine.draft_gain import DraftGain
from start_llm.engine.draft_index import MATCHES
from start_llm.engine.pass_times import PassTimes
from start_llm.engine.resources import EngineResources
from tests.cache.conversations import PLENTY, Cached, Picture, Talkers, Turn, memory_for, reference
from tests.engine.harness import GREEDY, Stepper, engine_request
from tests.ties import Reference, Tally

LENGTHS = (3, 7, 7, 15, 15)
_CHUNK = 512
_OTHER_CHUNKS = (61, 48, 31, 17, 11, 7, 5)
_TIGHT_TOKENS = 300
_TENANTS = (b"one", b"other")
_NOTHING = Reference((), ())


class Drafting(DraftGain):
    """Drafts always, as much as it may."""

    def lengths(self) -> tuple[int, ...]:
        return (*LENGTHS, LENGTHS[-1], *LENGTHS)

    def can_pay(self) -> bool:
        return True


assert len(LENGTHS) == len(MATCHES)


def almost(prompt: Sequence[int], reply: Sequence[int], chance: random.Random) -> tuple[int, ...]:
    """A text that a reply repeats, but for a token now and then, as a file that an edit changes."""
    changed = (chance.randrange(3, 200) if chance.random() < 0.12 else token for token in reply)
    return (*prompt[-4:], *changed)


@dataclass(eq=False)
class Asked(Turn):
    """A request, and what an engine without drafts and cache says to it."""

    sampling: Sampling = GREEDY
    salt: bytes = b""
    expected: Reference = _NOTHING
    texts: tuple[Sequence[int], ...] = ()

    def request(self, **changes: Any) -> EngineRequest:
        asked = engine_request(self.prompt, self.length, self.sampling, images=self.images)
        return replace(asked, **changes) if changes else asked


@dataclass
class Outcome:
    """What was played.

    Attributes:
        given_up: requests whose client left.
        wrong: what differs from the replies without drafts.
    """

    requests: int = 0
    given_up: int = 0
    preemptions: int = 0
    evictions: int = 0
    drafted: int = 0
    accepted: int = 0
    tally: Tally = field(default_factory=Tally)
    wrong: list[str] = field(default_factory=list[str])


class Play:
    """One engine that drafts, and its clients: some leave, some interrupt others, some are another tenant.

    Every second engine has memory for about one prompt. Its cache is checked after every step.

    Args:
        seed: decides all of it.
        pictures: what clients send, if anything.
    """

    def __init__(
        self, resources: EngineResources, seed: int, outcome: Outcome, pictures: Sequence[Picture] = ()
    ) -> None:
        self._resources = resources
        self._chance = random.Random(seed)
        self._outcome = outcome
        self._talkers = Talkers(self._chance, pictures)
        self._plain = Stepper(resources, longest_chunk=_CHUNK)
        ticks, self.gain = count(), Drafting(PassTimes())
        budget = PLENTY if seed % 2 else memory_for(resources, _TIGHT_TOKENS)
        self.engine = Cached(
            resources,
            budget,
            gain=self.gain,
            longest_chunk=_CHUNK,
            max_sequences=self._chance.choice([1, 2, 4]),
            clock=lambda: next(ticks) / 10,
            time_limits=TimeLimits(preempt_after_s=self._chance.choice([1, 10**6])),
        )

    def run(self, requests: int) -> None:
        """Raises what breaks; what differs is written to the outcome."""
        while requests > 0:
            turns = [self._asked() for _ in range(min(requests, self._chance.choice([1, 1, 1, 2, 3])))]
            requests -= len(turns)
            self._play(turns)
            for turn in turns:
                self._check(turn)
                self._talkers.heard(turn)
        metrics, drafts, outcome = self.engine.metrics, self.gain.metrics, self._outcome
        assert not metrics.failures
        outcome.preemptions += metrics.preemptions
        outcome.evictions += self.engine.cached.evictions
        outcome.drafted += drafts.drafted_tokens
        outcome.accepted += drafts.accepted_tokens

    def _asked(self) -> Asked:
        turn, chance = self._talkers.turn(), self._chance
        sampling = chance.choice([GREEDY, Sampling(temperature=0.8, top_k=5, seed=chance.randrange(100))])
        asked = Asked(
            turn.prompt,
            turn.boundaries,
            chance.choice([1, 2, 9, 24, 40]),
            turn.patience,
            turn.images,
            sampling=sampling,
            salt=chance.choice(_TENANTS),
        )
        asked.expected = self._expected(asked)
        asked.texts = (almost(asked.prompt, asked.expected.ids, chance),)
        return asked

    def _expected(self, asked: Asked) -> Reference:
        if asked.sampling == GREEDY:
            return reference(self._plain, asked.prompt, asked.length, asked.images)
        watched = self._plain.submit(asked.request())
        self._plain.finish(watched)
        return Reference(tuple(watched.tokens), (float("inf"),) * asked.length)

    def _play(self, turns: Sequence[Asked]) -> None:
        waiting, running = list(turns), list[Asked]()
        for step in count():
            if waiting and (not running or self._chance.random() < 0.2):
                running.append(self._submit(waiting.pop(0), step))
            self.engine.step()
            for turn in running:
                turn.watched.look()
                if turn.patience is not None and step >= turn.patience and not turn.is_over:
                    turn.watched.generation.cancel()
            running = [turn for turn in running if not turn.is_over]
            if not running and not waiting and not self.engine.is_busy:
                return

    def _submit(self, turn: Asked, step: int) -> Asked:
        more = {"boundaries": turn.boundaries, "salt": turn.salt, "draft_texts": turn.texts}
        turn.watched = self.engine.submit(turn.request(**more))
        turn.patience = None if turn.patience is None else step + turn.patience
        return turn

    def _check(self, turn: Asked) -> None:
        tokens, outcome = turn.watched.tokens, self._outcome
        outcome.requests += 1
        is_given_up = turn.watched.generation.cancelled
        outcome.given_up += is_given_up
        if not is_given_up and len(tokens) != turn.length:
            outcome.wrong.append(f"{len(tokens)} tokens instead of {turn.length}; {turn.watched.ending}")
        difference = outcome.tally.difference(
            tokens, turn.expected, lambda place: tokens[place] in self._undrafted(turn, tokens[:place])
        )
        if difference:
            outcome.wrong.append(f"a prompt of {len(turn.prompt)} tokens, {turn.sampling}: {difference}")

    def _undrafted(self, turn: Asked, reply: Sequence[int]) -> Iterator[int]:
        """What engines without drafts say next that compute prompt and reply in other pieces."""
        for longest in _OTHER_CHUNKS:
            plain = Stepper(self._resources, longest_chunk=longest)
            begun = replace(turn, prompt=(*turn.prompt, *reply), length=1)
            watched = plain.submit(begun.request())
            plain.finish(watched)
            yield from watched.tokens
