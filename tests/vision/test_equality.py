"""A model that sees says what mlx_vlm says, however its prompt comes into the caches."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from start_llm.engine.resources import EngineResources
from tests.cache.conversations import Cached
from tests.engine.harness import Stepper, engine_request
from tests.vision.seeing import (
    FAMILIES,
    GreedyReply,
    SeenPrompt,
    difference,
    greedy_reply,
    mlx_vlm_of,
    model_of,
    picture,
    prompt,
    resources_of,
    usage,
    words,
)

LENGTH = 64
LARGEST = {"qwen3_5": 1e-3, "qwen3_5_moe": 1e-3}
"""Differences of log-probabilities that are allowed: both packages have another epsilon in these networks."""
MOST = 1e-4
PIECE = 7
"""Tokens of a chunk that is much shorter than an image."""


@cache
def asked(family: str) -> SeenPrompt:
    first, second, third = words(30, 1), words(40, 2), words(20, 3)
    return prompt(model_of(family), f"Look:{first}", picture(1, 96, 128), second, picture(2, 160, 128), third)


@cache
def expected(family: str) -> GreedyReply:
    return mlx_vlm_of(family).says(asked(family), LENGTH)


def alone(resources: EngineResources, seen: SeenPrompt) -> GreedyReply:
    engine = Stepper(resources, longest_chunk=2048)
    watched = engine.submit(seen.request(LENGTH, top_logprobs=1))
    engine.finish(watched)
    assert engine.metrics.tower_runs == 2
    return greedy_reply(watched)


def in_pieces(resources: EngineResources, seen: SeenPrompt) -> GreedyReply:
    engine = Stepper(resources, longest_chunk=PIECE)
    watched = engine.submit(seen.request(LENGTH, top_logprobs=1))
    engine.finish(watched)
    assert engine.metrics.tower_runs == 2
    return greedy_reply(watched)


def beside_text(resources: EngineResources, seen: SeenPrompt) -> GreedyReply:
    """One reply begins before it and ends after it; another one comes and goes meanwhile."""
    engine = Stepper(resources, longest_chunk=64)
    before = engine.submit(engine_request([7, 8, 9] * 40, LENGTH + 60))
    engine.step_until(lambda: len(before.tokens) > 3)
    watched = engine.submit(seen.request(LENGTH, top_logprobs=1))
    engine.step_until(lambda: len(watched.tokens) > 3)
    beside = engine.submit(engine_request([5, 6] * 20, 9))
    engine.finish(before, watched, beside)
    return greedy_reply(watched)


def beside_itself(resources: EngineResources, seen: SeenPrompt) -> GreedyReply:
    """In one batch with another prompt that has one image less, and so another shift."""
    engine = Stepper(resources, longest_chunk=64)
    end = seen.spans[0][1] + 9
    other = engine.submit(engine_request(seen.ids[:end], LENGTH + 20, images=seen.runs[:1]))
    watched = engine.submit(seen.request(LENGTH, top_logprobs=1))
    engine.finish(other, watched)
    return greedy_reply(watched)


def restored(resources: EngineResources, seen: SeenPrompt) -> GreedyReply:
    engine = Cached(resources)
    boundary = (seen.spans[1][1] + 5,)
    engine.say(seen.ids, 3, boundary, images=seen.runs)
    ran = engine.metrics.tower_runs
    watched = engine.say(seen.ids, LENGTH, boundary, images=seen.runs, top_logprobs=1)
    assert usage(watched).cached >= boundary[0]
    assert engine.metrics.tower_runs == ran == 2
    return greedy_reply(watched)


def after_a_cancel(resources: EngineResources, seen: SeenPrompt) -> GreedyReply:
    """Its client left in the middle of the second image, and asks again."""
    engine = Cached(resources, longest_chunk=PIECE)
    boundary = (seen.spans[0][1] + 5,)
    gone = engine.submit(seen.request(LENGTH, boundaries=boundary))
    start = seen.spans[1][0]
    engine.step_until(lambda: engine.metrics.prefill and engine.metrics.prefill[0] > start)
    gone.generation.cancel()
    engine.step()
    watched = engine.say(seen.ids, LENGTH, boundary, images=seen.runs, top_logprobs=1)
    if not resources.vision or not resources.vision.reads_both_ways:
        assert usage(watched).cached <= start
        assert engine.cached.cut_images == 1
    assert usage(watched).cached >= boundary[0]
    assert engine.metrics.tower_runs == 2
    return greedy_reply(watched)


def preempted(resources: EngineResources, seen: SeenPrompt) -> GreedyReply:
    """It gives its place to another request in the middle of its reply, and goes on."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    engine = Cached(resources, clock=clock, max_sequences=1)
    watched = engine.submit(seen.request(LENGTH, top_logprobs=1))
    engine.step_until(lambda: len(watched.tokens) > 3)
    other = engine.submit(engine_request([5, 6] * 20, 9))
    engine.finish(watched, other)
    assert engine.metrics.preemptions
    assert engine.metrics.tower_runs == 2
    return greedy_reply(watched)


WAYS: list[Callable[[EngineResources, SeenPrompt], GreedyReply]] = [
    alone,
    in_pieces,
    beside_text,
    beside_itself,
    restored,
    after_a_cancel,
    preempted,
]


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS, ids=[way.__name__ for way in WAYS])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.product
def test_a_prompt_with_images_is_answered_as_by_mlx_vlm(family, way):
    ours = way(resources_of(family), asked(family))
    assert len(ours.tokens) == LENGTH
    assert difference(ours, expected(family)) <= LARGEST.get(family, MOST)


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_another_picture_makes_another_reply(family):
    resources, seen = resources_of(family), asked(family)
    other = prompt(
        model_of(family), f"Look:{words(30, 1)}", picture(3), words(40, 2), picture(2), words(20, 3)
    )
    engine = Stepper(resources)
    watched = [engine.submit(each.request(16, top_logprobs=1)) for each in (seen, other)]
    engine.finish(*watched)
    ours, theirs = (greedy_reply(request) for request in watched)
    assert ours.tokens != theirs.tokens or difference(ours, theirs) > 0.01
