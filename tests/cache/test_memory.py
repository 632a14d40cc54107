"""The counted memory is the real one: no more memory is in use than the budget and the running sequences
explain.
"""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generation_stream

from start_llm.engine.resources import EngineResources
from start_llm.models.loader import load
from tests.cache.conversations import Cached, Talkers, memory_for, talk, tokens
from tests.cache.desk import is_pinned
from tests.cache.integrity import check_cache
from tests.conftest import TinyModel
from tests.engine.harness import engine_request, uncached_resources
from tests.mlx_memory import active_bytes, rounded_up_bytes

SLACK = 200_000 + 20 * rounded_up_bytes()
"""Bytes: logits on their way, and what mlx allocates too much of each array."""
ROOM = 600_000
"""Bytes by which a sequence's caches grow at once; the cache hears of it later."""
ROUNDS = 6


@pytest.fixture(scope="module", params=["qwen3", "gemma3_text", "qwen3_5"])
def resources(request: pytest.FixtureRequest, tiny_model: TinyModel) -> EngineResources:
    model = load(tiny_model(request.param, hidden=128, layers=2))
    return uncached_resources(
        model.network, model.tokenizer.token_bytes, frozenset(), max_sequences=4, batches=True
    )


class Weighed(Cached):
    """Memory is looked at after every step, against what there was before the first one."""

    def __init__(self, resources: EngineResources, budget: int, **changes: Any) -> None:
        mx.eval(resources.network.parameters())
        self.before = active_bytes()
        self.budget = budget
        self.seen: list[int] = []
        super().__init__(resources, budget, **changes)

    @property
    def live_bytes(self) -> int:
        return self.cache._store.active_usage.nbytes + self.loop.executor.running.decoder.batched_bytes

    def step(self, times: int = 1) -> None:
        """A batch that was just put together is given way to, and one that a sequence has just left is let go
        of, at the next step.
        """
        for _ in range(times):
            before = self.live_bytes
            super().step()
            mx.synchronize(generation_stream)
            mx.clear_cache()
            live, stored = self.live_bytes, self.cache._store.usage.nbytes
            self.seen.append(mx.get_active_memory() - self.before)
            assert self.seen[-1] <= stored + max(before, live) + SLACK, "what is not counted is held"
            assert stored <= max(self.budget - min(before, live), 0) + ROOM or is_pinned(self.cache)

    def let_go(self) -> None:
        self.cache._evictor.limits = type(self.cache._evictor.limits)(budget_bytes=0)
        self.cache.shrink()
        check_cache(self.cache)


@pytest.mark.thorough
def test_at_every_step_memory_is_what_the_budget_and_the_running_sequences_explain(resources):
    engine = Weighed(resources, memory_for(resources, 1200))
    talkers = Talkers(random.Random(3))
    for _ in range(ROUNDS):
        talk(engine, talkers)
    assert engine.cached.evictions
    assert max(engine.seen) > 5 * SLACK, "or the slack hides what is looked for"
    engine.let_go()
    assert active_bytes() - engine.before < SLACK / 10


@pytest.mark.sample(2)
def test_once_all_sequences_of_a_batch_have_ended_no_memory_is_counted_for_them(resources):
    engine, rng = Cached(resources), random.Random(1)
    together = [engine.submit(engine_request(tokens(rng, 30, 30), 6)) for _ in range(3)]
    engine.step_until(lambda: all(watched.tokens for watched in together))
    assert engine.cached.live_bytes == engine.cache.batched_bytes > 0, "they lie in the batch alone"
    engine.finish(*together)
    assert (engine.cached.live_bytes, engine.cache.batched_bytes) == (0, 0)


@pytest.mark.thorough
def test_when_memory_is_short_in_fact_the_cache_gives_it_back(resources):
    short = [0]
    engine, rng = Cached(resources, shortage=lambda: short[0]), random.Random(4)
    for _ in range(4):
        engine.say(tokens(rng, 200, 200))
    growing = engine.submit(engine_request(tokens(rng, 30, 30), 120))
    engine.step_until(lambda: growing.tokens)
    kept = engine.cached.stored_bytes
    short[0] = kept // 2
    engine.step(64)
    assert 0 < engine.cached.stored_bytes <= kept - kept // 2
    assert engine.cached.evictions
    short[0] = 10**12
    engine.finish(growing)
    assert [len(growing.tokens), growing.ending is not None] == [120, True], "what runs is never cut short"


@pytest.mark.thorough
@pytest.mark.checked(2)
def test_what_rests_gives_way_to_a_reply_that_grows(resources):
    """Within 64 steps: the growth of one sequence alone shows nowhere else."""
    engine, rng = Cached(resources, memory_for(resources, 200) * 5 // 2), random.Random(2)
    engine.say(tokens(rng, 200, 200))
    growing = engine.submit(engine_request(tokens(rng, 240, 240), 120))
    engine.step_until(lambda: growing.tokens)
    assert engine.cached.stored_bytes
    engine.step(95)
    assert growing.ending is None
    live = engine.cache._store.active_usage.nbytes
    assert engine.cache._store.usage.nbytes + live <= memory_for(resources, 200) * 5 // 2


# -------------------------------------------------------------------------------------------------- in motion


@pytest.fixture(scope="module")
def deep(tiny_model: TinyModel) -> EngineResources:
    """Its KV outweighs what a step takes."""
    config = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128}
    model = load(tiny_model("qwen3", hidden=64, layers=12, **config))
    return uncached_resources(
        model.network, model.tokenizer.token_bytes, frozenset(), max_sequences=4, batches=True
    )


class Restoring(Cached):
    """Notes how much memory restoring takes at most, and what is held after each step."""

    def __init__(self, resources: EngineResources, budget: int) -> None:
        mx.eval(resources.network.parameters())
        self.before = active_bytes()
        self.most = 0
        super().__init__(resources, budget)
        opening = self.cache.opener.open

        def watched(*arguments: Any, **options: Any) -> Any:
            mx.reset_peak_memory()
            opened = opening(*arguments, **options)
            self.most = max(self.most, mx.get_peak_memory() - self.before)
            return opened

        self.cache.opener.open = watched  # pyright: ignore[reportAttributeAccessIssue]

    def step(self, times: int = 1) -> None:
        super().step(times)
        mx.synchronize(generation_stream)
        self.most = max(self.most, mx.get_active_memory() - self.before)


@pytest.mark.parametrize("common", [900, 1760], ids=["a short fork", "a longer fork"])
@pytest.mark.long
def test_a_conversation_that_goes_on_from_pages_is_never_there_twice(deep, common):
    """There is room for it and a tenth of it: the fork is gone when it is in the way."""
    rng = random.Random(11)
    budget = memory_for(deep, 2048) * 11 // 10
    engine = Restoring(deep, budget)
    start = tokens(rng, 1800, 1800)
    engine.say(start, 2)
    engine.say((*start[:common], *tokens(rng, 90, 90)), 2)
    engine.say((*start, *tokens(rng, 240, 240)), 4)
    assert engine.cached.reused_tokens == common + len(start)
    leaf = budget // 12
    assert engine.most <= budget + leaf + SLACK


class Sized(Cached):
    """Notes the tokens that a sequence's caches have arrays for, whenever that changes."""

    def __init__(self, resources: EngineResources) -> None:
        self.sizes: list[int] = []
        super().__init__(resources)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            super().step()
            for seq_cache in self.cache._store.seq_caches:
                size = self.cache._layers.room(seq_cache.caches)
                if seq_cache.is_active and size != (self.sizes or [0])[-1]:
                    self.sizes.append(size)


@pytest.mark.thorough
@pytest.mark.parametrize("reused", ["nothing", "a sequence cache", "pages"])
def test_the_caches_of_a_prompt_and_its_reply_are_made_once(resources, reused):
    """A sequence of layers alone cannot tell: one in six of a sliding model keeps every token."""
    engine, rng = Sized(resources), random.Random(12)
    prompt = tokens(rng, 900, 900)
    if reused != "nothing":
        engine.say(prompt[:500], 2, boundaries=(300,))
    if reused == "pages":
        engine.say((*prompt[:300], *tokens(rng, 400, 400)), 2, boundaries=(300,))
    engine.sizes.clear()
    engine.say(prompt, 120, boundaries=(300, 899))
    assert len(engine.sizes) <= 1
    assert all(len(prompt) + 120 <= size < len(prompt) + 120 + 256 for size in engine.sizes)
