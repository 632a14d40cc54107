"""A step is decided apart from being done: whoever executes the same plans computes and keeps the same."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from functools import cache

import mlx.core as mx
import pytest
from mlx_lm.generate import generation_stream

from start_llm.cache.eviction import EvictionLimits
from start_llm.cache.layers import Layers
from start_llm.cache.prompt_cache import PromptCache
from start_llm.core.engine_request import EngineRequest
from start_llm.core.events import Finished
from start_llm.core.sampling import Sampling
from start_llm.engine import step_plan
from start_llm.engine.draft_gain import DraftGain
from start_llm.engine.executor import StepExecutor
from start_llm.engine.generation import Generation
from start_llm.engine.pass_times import PASSES, PassTimes
from start_llm.engine.resources import EngineResources, TimeLimits
from start_llm.engine.schedule import Schedule
from start_llm.engine.step_plan import (
    ComputeChunk,
    ComputeChunks,
    DecodeToken,
    EndRequest,
    FreeMemory,
    JoinBatch,
    PlanClock,
    PreemptRequest,
    StartRequest,
    StepPart,
)
from start_llm.engine.time_share import EngineTime
from start_llm.telemetry.metrics import CacheMetrics, EngineMetrics
from tests.cache.conversations import PAGE
from tests.cache.integrity import check_cache
from tests.engine.harness import Stepper, Watched, engine_request, uncached_resources
from tests.engine.test_guards import Counting
from tests.engine.test_turns import Clock
from tests.ties import greedy_reference

BUDGET = 450_000
"""Bytes: too few for all that some of the conversations below compute."""


def small_cache(resources: EngineResources, clock: PlanClock) -> PromptCache:
    limits = EvictionLimits(budget_bytes=BUDGET)
    layers = Layers(resources.network)
    return PromptCache(layers, limits=limits, page_size=PAGE, metrics=CacheMetrics(), clock=clock)


class Leader(Stepper):
    """An engine whose plans are written down, as the texts that would be sent to others."""

    def __init__(self, resources: EngineResources, seed: int) -> None:
        clock = PlanClock(Clock(random.Random(seed).choice([0.01, 0.1, 0.5])))
        self.cache = small_cache(resources, clock)
        super().__init__(resources, clock=clock, cache=self.cache)
        self.sent: list[str] = []
        self.parts: list[StepPart] = []
        execute = self.loop.executor.execute

        def record(part: StepPart, at: float) -> None:
            self.parts.append(part)
            self.sent.append(json.dumps({"at": at, "kind": type(part).__name__, **asdict(part)}))
            execute(part, at)

        self.loop.executor.execute = record


class Follower:
    """An executor that has the requests and is sent plans: no planner, no speed, no time of its own."""

    def __init__(self, resources: EngineResources, requests: list[EngineRequest]) -> None:
        clock, metrics = PlanClock(standing), EngineMetrics()
        self.cache = small_cache(resources, clock)
        own = replace(resources, cache=self.cache, clock=clock)
        schedule = Schedule(standing)
        self.replies = [Watched(Generation(request)) for request in requests]
        for reply in self.replies:
            schedule.add(reply.generation, 1.0)
        with mx.stream(generation_stream):
            self.executor = StepExecutor(own, schedule, EngineTime(own, metrics), metrics)

    def follow(self, sent: list[str]) -> None:
        with mx.stream(generation_stream):
            for text in sent:
                values = json.loads(text)
                at, kind = values.pop("at"), getattr(step_plan, values.pop("kind"))
                self.executor.execute(kind(**values), at)


def standing() -> float:
    return 0.0


def kept(cache: PromptCache) -> tuple[object, ...]:
    """Everything that a cache keeps, by its tokens."""
    store = cache._store
    pages = sorted((page.start, tuple(page.tokens), page.holder is None) for page in store.tree.pages())
    sequences = sorted((tuple(entry.tokens), entry.is_active) for entry in store.seq_caches)
    return pages, sequences, sorted((entry.position, entry.tail) for entry in store.checkpoints)


def counts(cache: PromptCache) -> tuple[int, int, int]:
    metrics = cache._metrics
    return metrics.reused_tokens, metrics.computed_tokens, metrics.evictions


def resources_of(*, has_state: bool) -> EngineResources:
    return uncached_resources(
        Counting(has_state=has_state),
        lambda token: b"a",
        frozenset(),
        max_sequences=2 if has_state else 3,
        batches=not has_state,
        batches_prefill=not has_state,
        time_limits=TimeLimits(preempt_after_s=1, deadline_s=60),
    )


def conversation(seed: int) -> list[EngineRequest]:
    """Prompts that share beginnings, short and long, greedy and seeded; some are given up."""
    rng = random.Random(seed)
    beginnings = [tuple(rng.randrange(400) for _ in range(rng.choice([40, 150, 400]))) for _ in range(4)]
    requests: list[EngineRequest] = []
    for place in range(10):
        prompt = (*rng.choice(beginnings), *(rng.randrange(400) for _ in range(rng.randrange(1, 60))))
        sampling = Sampling(temperature=rng.choice([0.0, 1.5]), seed=place)
        boundaries = tuple(sorted({len(prompt) // 2, len(prompt)}))
        requests.append(engine_request(prompt, rng.choice([4, 20, 50]), sampling, boundaries=boundaries))
    return requests


@cache
def led(*, has_state: bool, seed: int) -> tuple[Leader, list[EngineRequest], list[Watched]]:
    """Requests that come, and some of which are given up, while others run."""
    leader = Leader(resources_of(has_state=has_state), seed)
    rng, requests = random.Random(seed), conversation(seed)
    replies: list[Watched] = []
    for request in requests:
        replies.append(leader.submit(request))
        leader.step(rng.randrange(1, 12))
        if rng.random() < 0.2:
            rng.choice(replies).generation.cancel()
    for _ in range(3000):
        if not leader.is_busy:
            break
        leader.step()
    return leader, requests, replies


CASES = [(has_state, seed) for has_state in (False, True) for seed in range(6)]


@pytest.mark.thorough
@pytest.mark.parametrize(("has_state", "seed"), CASES)
def test_whoever_executes_the_same_plans_computes_keeps_and_evicts_the_same(has_state, seed):
    leader, requests, replies = led(has_state=has_state, seed=seed)
    follower = Follower(resources_of(has_state=has_state), requests)
    follower.follow(leader.sent)
    check_cache(follower.cache)
    assert [reply.tokens for reply in follower.replies] == [reply.tokens for reply in replies]
    assert kept(follower.cache) == kept(leader.cache)
    assert counts(follower.cache) == counts(leader.cache)


@pytest.mark.thorough
def test_seeded_replies_of_a_model_follow_from_the_plans(resources):
    leader = Leader(replace(resources, max_sequences=2, time_limits=TimeLimits(preempt_after_s=1)), 0)
    requests = [engine_request((5, 6, seed), 24, Sampling(temperature=1.0, seed=seed)) for seed in range(4)]
    replies = [leader.submit(request) for request in requests]
    leader.finish(*replies)
    follower = Follower(resources, requests)
    follower.follow(leader.sent)
    assert [reply.tokens for reply in follower.replies] == [reply.tokens for reply in replies]
    assert leader.metrics.preemptions


@pytest.mark.thorough
def test_whoever_executes_the_same_plans_drafts_the_same(resources):
    """What a follower measures does not matter: its own passes would not let it draft."""
    cheap: dict[int, float] = dict.fromkeys(PASSES, 1.0)
    leading, following = DraftGain(PassTimes(cheap)), DraftGain(PassTimes({1: 1.0}))
    leader = Leader(replace(resources, max_sequences=1, gain=leading), 0)
    prompts = [tuple(range(5, 40 + seed)) for seed in range(3)]
    known = [greedy_reference(resources.network, prompt, 60).ids for prompt in prompts]
    requests = [
        engine_request(prompt, 60, draft_texts=(ids,)) for prompt, ids in zip(prompts, known, strict=True)
    ]
    replies = [leader.submit(request) for request in requests]
    leader.step(40)
    replies[0].generation.cancel()
    leader.finish(*replies[1:])
    follower = Follower(replace(resources, gain=following), requests)
    follower.follow(leader.sent)
    assert [reply.tokens for reply in follower.replies] == [reply.tokens for reply in replies]
    assert kept(follower.cache) == kept(leader.cache)
    metrics, same = leading.metrics, following.metrics
    assert metrics.drafts > 5
    assert (metrics.drafted_tokens, metrics.accepted_tokens) == (same.drafted_tokens, same.accepted_tokens)


@pytest.mark.thorough
def test_whoever_executes_the_same_plans_drafts_the_same_from_earlier_conversations(resources):
    cheap: dict[int, float] = dict.fromkeys(PASSES, 1.0)
    leading, following = DraftGain(PassTimes(cheap)), DraftGain(PassTimes({1: 1.0}))
    leader = Leader(replace(resources, max_sequences=1, gain=leading), 0)
    prompts = [tuple(range(5, 40 + seed)) for seed in range(2)]
    known = [greedy_reference(resources.network, prompt, 40).ids for prompt in prompts]
    requests = [
        engine_request((*prompt, *ids), 1, salt=b"me") for prompt, ids in zip(prompts, known, strict=True)
    ]
    requests += [engine_request(prompt, 40, salt=b"me") for prompt in prompts]
    for request in requests:
        leader.finish(leader.submit(request))
    follower = Follower(replace(resources, gain=following), requests)
    follower.follow(leader.sent)
    assert [tuple(reply.tokens) for reply in follower.replies[2:]] == known
    metrics, same = leading.metrics, following.metrics
    assert metrics.accepted_tokens > 20
    assert (metrics.drafted_tokens, metrics.accepted_tokens) == (same.drafted_tokens, same.accepted_tokens)


@pytest.mark.thorough
def test_every_kind_of_plan_is_among_those_that_were_followed():
    """Replies that were preempted, given up, restored and batched, and a cache that was too small."""
    leaders = [led(has_state=has_state, seed=seed)[0] for has_state, seed in CASES[::2]]
    parts = [part for leader in leaders for part in leader.parts]
    for kind in (
        EndRequest,
        PreemptRequest,
        StartRequest,
        ComputeChunk,
        ComputeChunks,
        JoinBatch,
        DecodeToken,
        FreeMemory,
    ):
        assert any(isinstance(part, kind) for part in parts), kind
    assert any(isinstance(part, EndRequest) and part.is_given_up for part in parts)
    assert any(isinstance(part, StartRequest) and part.restored > PAGE for part in parts)
    assert any(isinstance(part, JoinBatch) and part.beside for part in parts)
    assert sum(counts(leader.cache)[2] for leader in leaders) > 100


@pytest.mark.parametrize("restored", [0, 100, 299])
def test_a_start_restores_no_more_than_its_plan_says(restored):
    leader = Leader(resources_of(has_state=False), 0)
    leader.finish(leader.submit(engine_request(range(300), 4)))
    leader.inbox.put(Generation(engine_request(range(300), 4)))
    leader.loop._receive_all()
    with mx.stream(generation_stream):
        leader.loop.executor.execute(StartRequest(2, restored, 0.0), 0.0)
    assert leader.loop.executor.running.prefills
    assert leader.loop.executor.running.prefills[0].done == restored


@pytest.mark.parametrize("part", [StartRequest(7, 0, 0.0), ComputeChunk(7, 5)])
def test_a_plan_for_a_request_that_is_not_there_harms_no_other(part):
    leader = Leader(resources_of(has_state=False), 0)
    reply = leader.submit(engine_request(range(30), 20))
    leader.step_until(lambda: reply.tokens)
    leader.loop.executor.execute(part, 0.0)
    leader.finish(reply)
    assert isinstance(reply.ending, Finished)


@pytest.mark.parametrize("part", [EndRequest(7), PreemptRequest(7, 0.0), JoinBatch((7,))])
def test_a_plan_that_does_not_fit_the_requests_is_an_error(part):
    leader = Leader(resources_of(has_state=False), 0)
    with pytest.raises(ValueError, match="request 7"):
        leader.loop.executor.execute(part, 0.0)


def test_while_a_part_is_executed_time_is_the_plans():
    clock = PlanClock(lambda: 5.0)
    with pytest.raises(KeyError), clock.stopped(2.0):
        assert (clock(), clock.real()) == (2.0, 5.0)
        raise KeyError
    assert clock() == 5.0
