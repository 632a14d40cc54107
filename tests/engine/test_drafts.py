"""A reply is the same whether it is drafted or not: whatever of a draft is right, and whatever comes between."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from start_llm.core.events import Text
from start_llm.core.sampling import Sampling
from start_llm.engine.draft_gain import DraftGain
from start_llm.engine.draft_index import MATCHES, Draft, DraftIndex
from start_llm.engine.resources import EngineResources
from start_llm.models.loader import load
from tests.conftest import TinyModel
from tests.engine.harness import GREEDY, Stepper, Watched, engine_request, uncached_resources

FAMILIES = ["qwen3", "gemma3_text", "qwen3_5", "glm4_moe_lite", "gpt_oss"]
"""Plain; windows of 128; recurrent layers; latent; windows of 128 with sinks."""
PROMPT = tuple(range(3, 130))
REPLY = 60
LENGTHS = (3, 7, 7, 15, 15)
SEEDED = Sampling(temperature=0.8, top_k=5, seed=11)
PENALISED = replace(SEEDED, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)


class Drafting(DraftGain):
    """Drafts always, as much as it may."""

    def lengths(self) -> tuple[int, ...]:
        return LENGTHS

    def can_pay(self) -> bool:
        return True


class Prophet(DraftIndex):
    """Knows a reply, and is wrong about one of its tokens now and then."""

    reply: Sequence[int] = ()
    random = random.Random(0)

    def find(self, most: int, least_match: int = 0) -> Draft | None:
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
        model.network, model.tokenizer.token_bytes, frozenset(), max_sequences=4, batches=True
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


def reply_of(stepper: Stepper, **asked: Any) -> Reply:
    watched = stepper.submit(engine_request(PROMPT, REPLY, **asked))
    steps = 0
    while not (watched.look() and watched.ending):
        stepper.step()
        steps += 1
    texts = [event for event in watched.seen if isinstance(event, Text)]
    scored = [one for text in texts for one in text.logprobs]
    return Reply(watched.tokens, sum(text.surprisal for text in texts), scored, steps)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, PENALISED], ids=["greedy", "seeded", "penalised"])
def test_a_drafted_reply_is_the_same_in_fewer_steps(resources, known_reply, sampling):
    plain = reply_of(Stepper(resources), sampling=sampling)
    known_reply([*PROMPT, *plain.tokens])
    gain = Drafting()
    drafted = reply_of(Stepper(resources, gain=gain), sampling=sampling)
    assert drafted.tokens == plain.tokens
    assert drafted.steps < 0.6 * plain.steps
    assert 0 < gain.accepted < gain.drafted
