"""What rank 0 does, a follower does too; where it cannot, it says so. Both are in this process."""

from __future__ import annotations

import itertools
import random
import socket
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx_lm.generate import generation_stream

from start_llm.cache.eviction import EvictionLimits
from start_llm.cache.layers import Layers
from start_llm.cache.prompt_cache import PromptCache
from start_llm.core.events import Failed, Finished
from start_llm.core.prompt import KeptPrefix
from start_llm.core.sampling import Sampling
from start_llm.engine.draft_gain import DraftGain
from start_llm.engine.pass_times import PASSES, PassTimes
from start_llm.engine.resources import EngineResources, TimeLimits
from start_llm.engine.step_plan import ComputeChunk, PlanClock
from start_llm.ranks.follower import Follower, LeaderMessages, OutOfStep
from start_llm.ranks.leader import Leader
from start_llm.ranks.links import Link
from start_llm.ranks.wire import (
    SentBudget,
    SentEnd,
    SentPart,
    SentRequest,
    SentSettings,
    SentTrimming,
    SentTrouble,
)
from start_llm.telemetry.metrics import CacheMetrics
from tests.cache.conversations import PAGE
from tests.cache.integrity import check_cache
from tests.engine.harness import (
    Breakdown,
    FailsOnce,
    Stepper,
    Watched,
    Wrapped,
    engine_request,
    uncached_resources,
)
from tests.engine.test_guards import VOCABULARY, Counting
from tests.engine.test_guided import Reciter
from tests.engine.test_step_plans import counts, kept

HERE = "127.0.0.1"
SCRIPT = (70, 3, 350, 8, 9, 200)
"""Nothing that a network that counts would say. A longer reply loses its guide."""


class Pair:
    """Two ends of a connection, and the leader at one of them."""

    def __init__(self) -> None:
        with socket.create_server((HERE, 0)) as listener:
            connection = socket.create_connection(listener.getsockname())
            accepted, _ = listener.accept()
        self.near, self.far = Link(accepted, 1), Link(connection, 0)
        self.lost: list[tuple[str, bool]] = []
        self.ids: deque[mx.array] = deque()
        self.leader = Leader(cast("Any", SimpleNamespace(rank=0, size=2)), [self.near])

    def watch(self) -> None:
        self.leader.watch(lambda reason, is_final: self.lost.append((reason, is_final)))

    def say(self, _: mx.array, ids: mx.array) -> mx.array:
        """The ids that rank 0 has sampled go to the other rank."""
        self.ids.append(ids)
        return ids

    def hear(self, _: mx.array, ids: mx.array) -> mx.array:
        """It takes them, whatever it has sampled."""
        heard = self.ids.popleft()
        assert heard.shape == ids.shape
        return heard

    def until_lost(self) -> tuple[str, bool]:
        for _ in range(500):
            if self.lost:
                return self.lost[0]
            time.sleep(0.01)
        raise AssertionError("nobody was missed")


@pytest.fixture
def pair() -> Generator[Pair]:
    made = Pair()
    yield made
    made.near.close()
    made.far.close()


def with_cache(budget_bytes: int, *, has_state: bool = False) -> EngineResources:
    ticks = itertools.count()
    network, clock = Counting(has_state=has_state), PlanClock(lambda: next(ticks) / 1000)
    cache = PromptCache(
        Layers(network),
        limits=EvictionLimits(budget_bytes=budget_bytes),
        page_size=PAGE,
        metrics=CacheMetrics(),
        clock=clock,
    )
    plain = uncached_resources(network, lambda token: b"a", frozenset(), max_sequences=3, batches=True)
    limits = TimeLimits(preempt_after_s=0.001)
    return replace(plain, cache=cache, clock=clock, batches_prefill=True, time_limits=limits)


def led(pair: Pair, resources: EngineResources, requests: int) -> list[Watched]:
    """Have rank 0 answer random requests, some with a guide, and some of which are given up."""
    with mx.stream(generation_stream):
        engine = Stepper(resources, clock=resources.clock, followers=pair.leader, agree=pair.say)
        rng = random.Random(3)
        beginnings = [tuple(rng.randrange(400) for _ in range(length)) for length in (40, 150, 300)]
        replies: list[Watched] = []
        for place in range(requests):
            prompt = (*rng.choice(beginnings), *(rng.randrange(400) for _ in range(rng.randrange(1, 60))))
            sampling = Sampling(temperature=rng.choice([0.0, 1.5]), seed=place)
            guide = Reciter(SCRIPT, VOCABULARY) if place % 3 == 2 else None
            replies.append(engine.submit(engine_request(prompt, rng.choice([4, 30]), sampling, guide=guide)))
            engine.step(rng.randrange(1, 12))
            if place % 4 == 3:
                replies[-1].generation.cancel()
        for _ in range(2000):
            if not engine.is_busy:
                break
            engine.step()
        engine.step(30)  # arrays are trimmed when nothing else is to do
    return replies


def followed(
    pair: Pair, resources: EngineResources, on: Callable[[Follower], None] = lambda _: None
) -> Follower:
    """Do all that rank 0 has sent."""
    pair.leader.close()
    with mx.stream(generation_stream):
        follower = Follower(replace(resources, agree=pair.hear))
        on(follower)
        follower.follow(LeaderMessages(pair.far, lambda: None))
    return follower


@pytest.mark.thorough
def test_a_follower_computes_keeps_and_evicts_what_rank_0_does(pair):
    ours, theirs = with_cache(450_000), with_cache(450_000)
    replies = led(pair, ours, 12)
    followed(pair, theirs)
    check_cache(theirs.cache)
    endings = [type(reply.ending) for reply in replies if reply.look()]
    assert endings.count(Failed) > 0
    assert endings.count(Finished) > 4
    assert not pair.ids
    assert kept(theirs.cache) == kept(ours.cache)
    assert counts(theirs.cache) == counts(ours.cache)
    assert counts(ours.cache)[2] > 0
    assert theirs.cache.free_bytes == ours.cache.free_bytes


@pytest.mark.thorough
def test_a_budget_holds_on_all_ranks(pair):
    ours, theirs = with_cache(450_000), with_cache(10**9)
    led(pair, ours, 8)
    at = ours.clock()
    pair.leader.take_budget(100_000, at)
    with ours.clock.stopped(at):
        ours.cache.resize(100_000)
    followed(pair, theirs)
    assert kept(theirs.cache) == kept(ours.cache)
    assert theirs.cache.budget_bytes == 100_000


def test_what_a_client_wants_kept_is_kept_on_all_ranks(pair):
    """With recurrent layers, which keep a state there."""
    ours, theirs = with_cache(10**9, has_state=True), with_cache(10**9, has_state=True)
    with mx.stream(generation_stream):
        engine = Stepper(ours, clock=ours.clock, followers=pair.leader, agree=pair.say)
        engine.finish(engine.submit(engine_request(range(100), 4, kept=(KeptPrefix(37, 300),))))
    followed(pair, theirs)
    assert 37 in [checkpoint.position for checkpoint in ours.cache._store.checkpoints]
    assert kept(theirs.cache) == kept(ours.cache)


def test_what_a_guide_says_is_not_drafted_where_followers_have_none(pair):
    """They would draft what the guide forbids."""
    cheap: dict[int, float] = dict.fromkeys(PASSES, 1.0)
    ours, theirs = (
        replace(with_cache(10**9), gain=DraftGain(PassTimes(cheap)), max_sequences=1) for _ in range(2)
    )
    prompt, script = [*SCRIPT, *SCRIPT, *SCRIPT], SCRIPT * 3
    with mx.stream(generation_stream):
        engine = Stepper(ours, clock=ours.clock, followers=pair.leader, agree=pair.say)
        guided = engine.submit(engine_request(prompt, 17, guide=Reciter(script, VOCABULARY)))
        engine.finish(guided)
    assert guided.tokens == list(script[:17])
    followed(pair, theirs)
    assert kept(theirs.cache) == kept(ours.cache)


def test_a_follower_that_has_not_what_rank_0_has_computes_no_further(pair):
    ours, theirs = with_cache(450_000), with_cache(450_000)
    led(pair, ours, 2)

    def lose_a_byte(follower: Follower) -> None:
        follower.do(SentBudget(450_000, 0.0))
        theirs.cache.batched_bytes = 1

    with pytest.raises(OutOfStep, match="before StartRequest it has"):
        followed(pair, theirs, lose_a_byte)


def test_a_follower_whose_part_fails_computes_no_further(pair, capsys):
    ours, theirs = with_cache(10**9), with_cache(10**9)
    led(pair, ours, 2)
    broken = Wrapped(theirs.network, FailsOnce(lambda shape: True, nth=3))
    with pytest.raises(OutOfStep, match="failed; the traceback was printed"):
        followed(pair, replace(theirs, network=broken))
    assert Breakdown.__name__ in capsys.readouterr().err


def test_a_request_under_another_number_is_no_request_of_rank_0():
    with pytest.raises(OutOfStep, match="request 2 is the number 1 here"):
        Follower(with_cache(10**9)).do(SentRequest(2, engine_request((1, 2))))


def test_what_no_rank_0_sends_is_refused():
    with pytest.raises(OutOfStep, match="SentSettings"):
        Follower(with_cache(10**9)).do(SentSettings(None, {}))


def test_a_part_that_fails_on_rank_0_ends_the_service(pair, capsys, monkeypatch):
    monkeypatch.setattr("start_llm.ranks.leader._NAMING_S", 0.0)
    pair.watch()
    resources = with_cache(10**9)
    broken = Wrapped(resources.network, FailsOnce(lambda shape: True, nth=3))
    engine = Stepper(replace(resources, network=broken), clock=resources.clock, followers=pair.leader)
    engine.submit(engine_request(range(30), 20))
    engine.step(3)
    reason, is_final = pair.until_lost()
    assert "failed on rank 0" in reason
    assert not is_final
    assert Breakdown.__name__ in capsys.readouterr().err


def test_a_part_that_rank_0_cannot_execute_ends_the_service(pair, capsys, monkeypatch):
    monkeypatch.setattr("start_llm.ranks.leader._NAMING_S", 0.0)
    pair.watch()
    resources = with_cache(10**9)
    engine = Stepper(resources, clock=resources.clock, followers=pair.leader)
    monkeypatch.setattr(engine.loop.executor, "_preempt", _refuse)
    monkeypatch.setattr(engine.loop.executor, "_go_on_with_prefill", _refuse)
    engine.submit(engine_request(range(30), 20))
    engine.step(3)
    assert "failed on rank 0" in pair.until_lost()[0]
    assert "no such request" in capsys.readouterr().err


def test_a_request_whose_start_cannot_be_planned_is_forgotten_on_all_ranks(pair, capsys, monkeypatch):
    ours = with_cache(10**9)
    monkeypatch.setattr(ours.cache.opener, "restorable", _refuse)
    engine = Stepper(ours, clock=ours.clock, followers=pair.leader)
    asked = engine.submit(engine_request(range(30), 20))
    engine.finish(asked)
    assert isinstance(asked.ending, Failed)
    assert len(followed(pair, with_cache(10**9))._schedule) == len(engine.loop.schedule) == 0
    assert "no such request" in capsys.readouterr().err


def _refuse(*_: object) -> None:
    raise ValueError("no such request")


def test_where_a_step_fails_because_a_rank_is_gone_that_rank_is_named(pair):
    pair.watch()
    resources = with_cache(10**9)

    def leave(_: tuple[int, ...]) -> None:
        pair.far.close()
        raise Breakdown("the connection to a peer was lost")

    network = Wrapped(resources.network, leave)
    engine = Stepper(replace(resources, network=network), clock=resources.clock, followers=pair.leader)
    engine.submit(engine_request(range(30), 20))
    engine.step(3)
    assert pair.until_lost() == (f"Rank 1 at {HERE} is gone.", False)


def test_a_follower_that_is_gone_is_missed(pair):
    pair.watch()
    pair.far.close()
    assert pair.until_lost() == (f"Rank 1 at {HERE} is gone.", False)


def test_a_follower_that_is_in_trouble_is_heard(pair):
    pair.watch()
    pair.far.send(SentTrouble("No such folder.", is_final=True))
    assert pair.until_lost() == (f"Rank 1 at {HERE} cannot go on. No such folder.", True)


def test_a_follower_that_sends_something_else_is_none(pair):
    pair.watch()
    pair.far.send(SentTrimming(1))
    assert "what no follower sends" in pair.until_lost()[0]


def test_nobody_is_missed_after_the_end(pair):
    pair.watch()
    pair.leader.close()
    assert pair.far.receive() == SentEnd()
    pair.far.close()
    assert pair.near  # its thread has read the end of the connection
    assert not pair.lost


def test_what_is_sent_to_a_rank_that_is_gone_is_noticed_too(pair):
    lost: list[str] = []
    pair.leader._on_lost = lambda reason, is_final: lost.append(reason)
    pair.near.close()
    pair.leader.take_trimmed(1)
    assert lost == [f"Rank 1 at {HERE} is gone."]


def test_nothing_is_sent_where_nothing_was_trimmed(pair):
    pair.leader.take_trimmed(0)
    pair.leader.take_trimmed(2)
    assert pair.far.receive() == SentTrimming(2)


def test_who_waits_in_a_pass_notices_that_rank_0_is_gone(pair):
    gone: list[bool] = []
    LeaderMessages(pair.far, lambda: gone.append(True))
    pair.near.close()
    for _ in range(500):
        if gone:
            return
        time.sleep(0.01)
    raise AssertionError("nobody noticed")


def test_a_part_is_sent_with_the_state_before_it(pair):
    resources = with_cache(10**9)
    engine = Stepper(resources, clock=resources.clock)
    state = engine.loop.executor.state()
    pair.leader.take_part(ComputeChunk(1, 5), 2.5, lambda: state)
    assert pair.far.receive() == SentPart(ComputeChunk(1, 5), 2.5, state)
    pair.leader.take_budget(5, 1.5)
    assert pair.far.receive() == SentBudget(5, 1.5)
