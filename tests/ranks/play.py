"""Requests that one engine answers, alone or as rank 0 of several: the same ones, in the same order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from start_llm.cache.eviction import EvictionLimits
from start_llm.cache.layers import Layers
from start_llm.cache.prompt_cache import PromptCache
from start_llm.cache.rollback import can_roll_back
from start_llm.core.events import Restored
from start_llm.core.sampling import Sampling
from start_llm.engine.draft_gain import DraftGain
from start_llm.engine.pass_times import PASSES, PassTimes
from start_llm.engine.resources import EngineResources
from start_llm.engine.step_plan import PlanClock
from start_llm.models.loader import LoadedModel
from start_llm.telemetry.metrics import CacheMetrics
from tests.cache.conversations import PAGE, restored_difference
from tests.engine.harness import Stepper, Watched, engine_request, standing_still

LENGTH = 12
"""Tokens of a reply."""
BUDGET = 50_000_000
_VOCABULARY = 1500
_CHEAP: dict[int, float] = dict.fromkeys(PASSES, 1.0)
"""Passes that cost no more for more tokens, so that whatever can be drafted is."""


@dataclass(frozen=True)
class Heard:
    """What an engine has answered.

    Attributes:
        greedy: of each turn of a conversation the prompt, the reply, and the tokens that were restored.
        seeded: replies that were decoded together.
        kept: tokens of a reply that was given up, and how many of them and of its prompt the next one got.
        counts: tokens that were computed and reused, and evictions.
        repeated: a reply to a prompt that repeats itself.
        drafts: tokens that were drafted, and those that were right.
    """

    greedy: list[tuple[list[int], list[int], int]]
    seeded: list[list[int]]
    kept: tuple[int, int]
    counts: tuple[int, int, int]
    repeated: list[int]
    drafts: tuple[int, int]


def resources_of(model: LoadedModel, **more: Any) -> EngineResources:
    """Resources with a prompt cache of small pages."""
    clock, layers = PlanClock(standing_still), Layers(model.network)
    cache = PromptCache(
        layers,
        limits=EvictionLimits(budget_bytes=BUDGET),
        page_size=PAGE,
        metrics=CacheMetrics(),
        clock=clock,
    )
    return EngineResources(
        model.network,
        model.tokenizer.token_bytes,
        frozenset(),
        max_sequences=4,
        batches=True,
        cache=cache,
        clock=clock,
        gain=DraftGain(PassTimes(_CHEAP)) if can_roll_back(layers.fresh()) else None,
        **more,
    )


def play(resources: EngineResources) -> Heard:
    """A conversation of three turns, seeded replies at once, one that is given up, and one that repeats."""
    engine = Stepper(resources, clock=resources.clock)
    rng = random.Random(1)
    history = _tokens(rng, 150)
    greedy: list[tuple[list[int], list[int], int]] = []
    for _ in range(3):
        reply = _answered(engine, history)
        greedy.append((list(history), reply.tokens, _restored(reply)))
        history = [*history, *reply.tokens, *_tokens(rng, 40)]
    beginning = _tokens(rng, 60)
    prompts = [[*beginning, *_tokens(rng, length)] for length in (5, 30, 90)]
    seeded = [
        engine.submit(engine_request(prompt, LENGTH, Sampling(temperature=1.0, seed=place)))
        for place, prompt in enumerate(prompts)
    ]
    engine.finish(*seeded)
    given_up = engine.submit(engine_request(prompts[0], 200))
    engine.step_until(lambda: len(given_up.tokens) > 5)
    given_up.generation.cancel()
    engine.step(2)
    again = _answered(engine, [*prompts[0], *given_up.tokens[:3], 7])
    repeated = _answered(engine, _tokens(rng, 12) * 6)
    metrics, gain = resources.cache._metrics, resources.gain
    counts = (metrics.computed_tokens, metrics.reused_tokens, metrics.evictions)
    return Heard(
        greedy,
        [answer.tokens for answer in seeded],
        (len(given_up.tokens), _restored(again)),
        counts,
        repeated.tokens,
        (gain.metrics.drafted_tokens, gain.metrics.accepted_tokens) if gain else (0, 0),
    )


def truth(resources: EngineResources, network: Any) -> float:
    """The largest difference between logits behind what is kept and behind the same tokens computed anew.

    Args:
        network: gives equal logits on all ranks, which compare together.
    """
    cache = resources.cache
    kept = sorted({tuple(sequence.tokens) for sequence in cache._store.seq_caches}, key=len)
    return max(restored_difference(network, cache, (*ids, 1, 2, 3), ()) for ids in kept[-3:])


def _answered(engine: Stepper, prompt: Sequence[int]) -> Watched:
    reply = engine.submit(engine_request(prompt, LENGTH, boundaries=(len(prompt),)))
    engine.finish(reply)
    return reply


def _restored(reply: Watched) -> int:
    return next(event.tokens for event in reply.seen if isinstance(event, Restored))


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(_VOCABULARY) for _ in range(count)]
