"""A reply is the same whether it is drafted or not, however much of a draft is right."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

from start_llm.core.engine_request import ReasoningLimit
from start_llm.core.events import Text
from start_llm.core.limits import TimeLimits
from start_llm.core.sampling import Sampling
from start_llm.engine.draft_gain import DraftGain
from start_llm.engine.draft_index import MATCHES, Draft, DraftIndex
from start_llm.engine.pass_times import PassTimes
from start_llm.engine.resources import EngineResources
from start_llm.models.loader import load
from tests.cache.conversations import Cached
from tests.conftest import TinyModel
from tests.engine.drafted import Drafting
from tests.engine.harness import GREEDY, Stepper, engine_request, uncached_resources

pytestmark = [pytest.mark.product, pytest.mark.sample(2)]

FAMILIES = ["qwen3", "gemma3_text", "qwen3_5", "glm4_moe_lite", "gpt_oss"]
"""Plain; windows of 128; recurrent layers; latent; windows of 128 with sinks."""
PROMPT = tuple(range(3, 130))
OTHER = tuple(range(200, 150, -1))
REPLY = 60
SEEDED = Sampling(temperature=0.8, top_k=5, seed=11)
PENALISED = replace(SEEDED, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)


class Prophet(DraftIndex):
    """Knows a reply, and is wrong about one of its tokens now and then."""

    reply: Sequence[int] = ()
    random = random.Random(0)

    def find(self, most: int) -> Draft | None:
        followed = [*self.reply[len(self) : len(self) + most]]
        if not followed:
            return None
        if self.random.random() < 0.7:
            followed[self.random.randrange(len(followed))] = self.random.randrange(3, 200)
        return Draft(tuple(followed), self.random.randrange(len(MATCHES)))


@pytest.fixture(scope="module", params=FAMILIES)
def resources(request: pytest.FixtureRequest, tiny_model: TinyModel) -> EngineResources:
    model = load(tiny_model(request.param, hidden=128, layers=2))
    return uncached_resources(
        model.network,
        model.tokenizer.token_bytes,
        frozenset(),
        max_sequences=4,
        batches=True,
        batches_prefill=True,
    )


@pytest.fixture
def known_reply(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[int]], None]:
    """Lets drafts come from a reply that is known."""

    def know(tokens: Sequence[int]) -> None:
        monkeypatch.setattr(Prophet, "reply", tuple(tokens))
        monkeypatch.setattr(Prophet, "random", random.Random(5))
        monkeypatch.setattr("start_llm.engine.sequence.DraftIndex", Prophet)

    return know


@dataclass
class Reply:
    tokens: list[int]
    surprisal: float
    logprobs: list[Any]
    steps: int


def reply_of(stepper: Stepper, prompt: Sequence[int] = PROMPT, **asked: Any) -> Reply:
    watched = stepper.submit(engine_request(prompt, REPLY, **asked))
    steps = 0
    while not (watched.look() and watched.ending):
        stepper.step()
        steps += 1
    texts = [event for event in watched.seen if isinstance(event, Text)]
    scored = [entry for text in texts for entry in text.logprobs]
    return Reply(watched.tokens, sum(text.surprisal for text in texts), scored, steps)


SAMPLINGS = {"greedy": GREEDY, "seeded": SEEDED, "penalised": PENALISED}


@pytest.fixture(params=SAMPLINGS)
def sampling(request: pytest.FixtureRequest) -> Sampling:
    return SAMPLINGS[request.param]


def drafting(resources: EngineResources, **more: Any) -> Cached:
    """An engine that drafts always, and checks its cache after every step."""
    return Cached(resources, gain=Drafting(PassTimes()), **more)


@pytest.mark.thorough
def test_a_drafted_reply_is_the_same_in_fewer_steps(resources, known_reply, sampling):
    plain = reply_of(Stepper(resources), sampling=sampling)
    known_reply([*PROMPT, *plain.tokens])
    gain = Drafting(PassTimes())
    drafted = reply_of(Cached(resources, gain=gain), sampling=sampling)
    assert drafted.tokens == plain.tokens
    assert drafted.steps < 0.6 * plain.steps
    assert 0 < gain.metrics.accepted_tokens < gain.metrics.drafted_tokens


@pytest.mark.thorough
@pytest.mark.checked(2)
def test_what_is_reported_of_a_token_is_the_same(resources, known_reply, monkeypatch):
    """Its log-probability, those of the likeliest ones, and how surprising it was."""
    monkeypatch.setattr("secrets.randbits", lambda bits: 2**bits - 7)
    asked: dict[str, Any] = {"sampling": replace(SEEDED, seed=None), "top_logprobs": 3}
    plain = reply_of(Stepper(resources), **asked)
    known_reply([*PROMPT, *plain.tokens])
    drafted = reply_of(drafting(resources), **asked)
    assert drafted.tokens == plain.tokens
    assert drafted.surprisal == pytest.approx(plain.surprisal, rel=1e-3) != 0
    for ours, theirs in zip(drafted.logprobs, plain.logprobs, strict=True):
        assert [candidate.token for candidate in ours.top] == [candidate.token for candidate in theirs.top]
        assert [candidate.logprob for candidate in ours.top] == pytest.approx(
            [candidate.logprob for candidate in theirs.top], abs=1e-3
        )


@pytest.mark.thorough
@pytest.mark.parametrize("steps", [3, 8, 13])
def test_another_reply_may_join_at_any_step(resources, known_reply, steps: int):
    alone = [reply_of(Stepper(resources), prompt=prompt, sampling=PENALISED) for prompt in (PROMPT, OTHER)]
    known_reply([*PROMPT, *alone[0].tokens])
    stepper = drafting(resources)
    first = stepper.submit(engine_request(PROMPT, REPLY, PENALISED))
    stepper.step(steps)
    second = stepper.submit(engine_request(OTHER, 20, PENALISED))
    stepper.finish(first, second)
    assert [first.tokens, second.tokens] == [alone[0].tokens, alone[1].tokens[:20]]


@pytest.mark.thorough
@pytest.mark.parametrize("steps", [3, 8, 13])
def test_a_reply_that_is_given_up_leaves_a_cache_that_is_true(resources, known_reply, steps: int):
    """The next turn goes on from what it left."""
    plain = reply_of(Stepper(resources))
    known_reply([*PROMPT, *plain.tokens])
    stepper = drafting(resources)
    first = stepper.submit(engine_request(PROMPT, REPLY))
    stepper.step(steps)
    tokens = first.tokens
    first.generation.cancel()
    stepper.step()
    assert tokens == plain.tokens[: len(tokens)]
    following = (*PROMPT, *tokens, *OTHER[:5])
    expected = reply_of(Stepper(resources), prompt=following)
    assert reply_of(stepper, prompt=following).tokens == expected.tokens


@pytest.mark.thorough
def test_replies_that_take_turns_are_the_same(resources, known_reply):
    alone = [reply_of(Stepper(resources), prompt=prompt, sampling=PENALISED) for prompt in (PROMPT, OTHER)]
    known_reply([*PROMPT, *alone[0].tokens])
    ticks = iter(range(10**6))
    limits = TimeLimits(preempt_after_s=1)
    stepper = drafting(resources, clock=lambda: next(ticks) / 10, max_sequences=1, time_limits=limits)
    both = [stepper.submit(engine_request(prompt, 30, PENALISED)) for prompt in (PROMPT, OTHER)]
    stepper.finish(*both)
    assert stepper.metrics.preemptions > 2
    assert [reply.tokens for reply in both] == [reply.tokens[:30] for reply in alone]


@pytest.mark.parametrize("most", [1, 2, 5, 17])
@pytest.mark.sample(4)
def test_a_draft_does_not_go_beyond_the_end_of_a_reply(resources, known_reply, most: int):
    plain = reply_of(Stepper(resources))
    known_reply([*PROMPT, *plain.tokens])
    stepper = drafting(resources)
    limited = stepper.submit(engine_request(PROMPT, most))
    stepper.finish(limited)
    assert limited.tokens == plain.tokens[:most]
    end = plain.tokens[most]
    ended = drafting(replace(resources, eos_token_ids=frozenset({end})))
    reply = reply_of(ended)
    assert reply.tokens == plain.tokens[: plain.tokens.index(end) + 1]


@pytest.mark.parametrize("most", [4, 11])
@pytest.mark.sample(6)
def test_reasoning_that_is_closed_is_followed_by_the_same(resources, known_reply, most: int):
    limit = ReasoningLimit(
        max_reasoning_tokens=most, starts_open=True, opening="<a>", closing="</a>", closing_tokens=(9, 8, 7)
    )
    plain = reply_of(Stepper(resources), sampling=SEEDED, reasoning=limit)
    assert tuple(plain.tokens[most : most + 3]) == (9, 8, 7)
    known_reply([*PROMPT, *plain.tokens])
    assert reply_of(drafting(resources), sampling=SEEDED, reasoning=limit).tokens == plain.tokens


@cache
def few_behind(tokens: tuple[int, ...], vocabulary: int) -> list[int]:
    chance = random.Random(repr(tokens))
    return chance.sample(range(3, vocabulary), chance.choice([1, 1, 3, 40]))


class Choosing:
    """A guide that allows a few tokens at each place, and one alone at some."""

    def __init__(self, vocabulary: int = 2048) -> None:
        self._vocabulary = vocabulary
        self.tokens: list[int] = []
        self.certain = 0

    def _few(self, tokens: Sequence[int]) -> list[int]:
        return few_behind(tuple(tokens[-3:]), self._vocabulary)

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            assert token in self._few(self.tokens)
            self.tokens.append(token)

    def allowed(self) -> bytes:
        mask = bytearray(self._vocabulary)
        for token in self._few(self.tokens):
            mask[token] = 1
        return bytes(mask)

    def forced(self) -> list[int]:
        forced_tokens: list[int] = []
        while len(forced_tokens) < 4 and len(few := self._few([*self.tokens, *forced_tokens])) == 1:
            forced_tokens += few
        return forced_tokens

    def count_allowed(self, tokens: Sequence[int]) -> int:
        self.certain = len(self.tokens)
        seen = list(self.tokens)
        for count, token in enumerate(tokens):
            if token not in self._few(seen):
                return count
            seen.append(token)
        return len(tokens)

    def go_back(self, kept: int) -> None:
        del self.tokens[self.certain + kept :]


@pytest.mark.thorough
@pytest.mark.parametrize("steps", [None, 6])
def test_a_guided_reply_is_the_same_in_fewer_steps(resources, known_reply, sampling, steps: int | None):
    """Alone, and with another one that joins it after some steps."""
    plain = reply_of(Stepper(resources), sampling=sampling, guide=Choosing())
    other = reply_of(Stepper(resources), prompt=OTHER)
    known_reply([*PROMPT, *plain.tokens])
    stepper = drafting(resources)
    if steps is None:
        drafted = reply_of(stepper, sampling=sampling, guide=Choosing())
        assert drafted.tokens == plain.tokens
        assert drafted.steps < 0.8 * plain.steps
        return
    first = stepper.submit(engine_request(PROMPT, REPLY, sampling, guide=Choosing()))
    stepper.step(steps)
    second = stepper.submit(engine_request(OTHER, REPLY))
    stepper.finish(first, second)
    assert [first.tokens, second.tokens] == [plain.tokens, other.tokens]


@pytest.mark.sample(6)
def test_no_draft_where_it_does_not_pay(resources):
    """A pass of four tokens costs as much as four passes."""
    gain = DraftGain(PassTimes({1: 0.1}))
    stepper = Cached(resources, gain=gain)
    reply_of(stepper)
    assert (gain.can_pay(), gain.lengths(), gain.metrics.drafts) == (False, (), 0)
