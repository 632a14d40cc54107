"""Requests that one engine answers, alone or as rank 0 of several: the same ones, in the same order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from start_llm.cache.eviction import EvictionLimits
from start_llm.cache.layers import Layers
from start_llm.cache.prompt_cache import PromptCache
from start_llm.core.events import Restored
from start_llm.core.sampling import Sampling
from start_llm.engine.resources import EngineResources
from start_llm.engine.step_plan import PlanClock
from start_llm.models.loader import LoadedModel
from start_llm.telemetry.metrics import CacheMetrics
from tests.cache.conversations import PAGE
from tests.engine.harness import Stepper, Watched, engine_request

LENGTH = 12
"""Tokens of a reply."""
BUDGET = 50_000_000
_VOCABULARY = 1500


@dataclass(frozen=True)
class Heard:
    """What an engine has answered.

    Attributes:
        greedy: of each turn of a conversation the prompt, the reply, and the tokens that were restored.
        seeded: replies that were decoded together.
        kept: tokens of a reply that was given up, and how many of them and of its prompt the next one got.
        counts: tokens that were computed and reused, and evictions.
    """

    greedy: list[tuple[list[int], list[int], int]]
    seeded: list[list[int]]
    kept: tuple[int, int]
    counts: tuple[int, int, int]


def resources_of(model: LoadedModel, **more: Any) -> EngineResources:
    """Resources with a prompt cache of small pages."""
    clock = PlanClock()
    cache = PromptCache(
        Layers(model.network),
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
        **more,
    )


def play(resources: EngineResources) -> Heard:
    """A conversation of three turns, four seeded replies at once, and one that is given up."""
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
    metrics = resources.cache._metrics
    return Heard(
        greedy,
        [one.tokens for one in seeded],
        (len(given_up.tokens), _restored(again)),
        (metrics.computed_tokens, metrics.reused_tokens, metrics.evictions),
    )


def _answered(engine: Stepper, prompt: Sequence[int]) -> Watched:
    reply = engine.submit(engine_request(prompt, LENGTH, boundaries=(len(prompt),)))
    engine.finish(reply)
    return reply


def _restored(reply: Watched) -> int:
    return next(event.tokens for event in reply.seen if isinstance(event, Restored))


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(_VOCABULARY) for _ in range(count)]
