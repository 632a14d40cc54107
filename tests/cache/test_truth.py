"""An engine with a prompt cache says what one without says, whatever was asked before."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from start_llm.cache.eviction import EvictionLimits
from start_llm.cache.layers import Layers
from start_llm.cache.prompt_cache import PromptCache
from start_llm.core.events import Failed, Finished
from start_llm.engine.resources import EngineResources
from start_llm.models.loader import load
from start_llm.telemetry.metrics import CacheMetrics
from tests.cache.conversations import (
    PAGE,
    PLENTY,
    Cached,
    Talkers,
    memory_for,
    reference,
    restored_difference,
    says_too,
    talk,
    tokens,
)
from tests.conftest import TinyModel
from tests.engine.harness import (
    Breakdown,
    FailsOnce,
    Stepper,
    Watched,
    Wrapped,
    engine_request,
    uncached_resources,
)
from tests.slices import rounds
from tests.ties import Reference, Tally

FAMILIES = ["qwen3", "gemma3_text", "qwen3_5", "glm4_moe_lite", "gpt_oss"]
"""Plain; windows of 128; recurrent layers; latent; windows of 128 with sinks."""
ROUNDS = rounds(24, checked=12, few=12)


@pytest.fixture(scope="module", params=FAMILIES)
def resources(request: pytest.FixtureRequest, tiny_model: TinyModel) -> EngineResources:
    """Replies are as long as they are asked to be."""
    model = load(tiny_model(request.param, hidden=128, layers=2))
    return uncached_resources(
        model.network,
        model.tokenizer.token_bytes,
        frozenset(),
        max_sequences=4,
        batches=True,
        batches_prefill=True,
    )


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    """Of all families together."""
    whole = Tally()
    yield whole
    whole.assert_ties_are_rare()


def usage(watched: Watched) -> Any:
    assert isinstance(watched.ending, Finished)
    return watched.ending.usage


@pytest.mark.parametrize("room", [None, 600], ids=["plenty of memory", "memory for two prompts"])
@pytest.mark.product
@pytest.mark.sample(12)
@pytest.mark.checked(5)
def test_random_conversations_are_what_they_are_without_a_cache(resources, tally, room):
    engine = Cached(resources, PLENTY if room is None else memory_for(resources, room))
    plain = Stepper(resources)
    talkers = Talkers(random.Random(7))
    turns = [turn for _ in range(ROUNDS) for turn in talk(engine, talkers)]
    for turn in turns:
        assert turn.watched.generation.cancelled or len(turn.watched.tokens) == turn.length
        tally.compare(turn.watched.tokens, reference(plain, turn.prompt, turn.length))
    assert engine.metrics.failures == 0
    assert engine.cached.reused_tokens > engine.metrics.prefilled_tokens / (2 if room is None else 10)
    assert (engine.cached.evictions > ROUNDS) == (room is not None)
    assert any(turn.watched.generation.cancelled for turn in turns)
    assert engine.cached.reused_in_place


# ----------------------------------------------------------------------------------------- counts, and logits


def counting(resources: EngineResources) -> tuple[Cached, list[int]]:
    forwarded: list[int] = []
    network = Wrapped(resources.network, lambda shape: forwarded.append(shape[0] * shape[1]))
    return Cached(resources, network=network), forwarded


@pytest.mark.sample(4)
def test_cached_tokens_are_those_that_were_not_computed(resources):
    """A reply of n tokens takes a step for the last token of its prompt, and one for each of its own."""
    engine, forwarded = counting(resources)
    rng = random.Random(1)
    system, prompt = tokens(rng, 60, 60), tokens(rng, 100, 100)
    asked = [prompt, prompt, (*prompt, 5), prompt[:77], (*prompt[:50], 9, 9), (*system, 4), (*system, 5)]
    for ids in asked:
        forwarded.clear()
        counts = usage(engine.say(ids, 5, boundaries=(60, len(ids) - 3)))
        assert counts.prompt == len(ids)
        assert counts.prompt - 1 - counts.cached == sum(forwarded) - 1 - 5


@pytest.mark.sample(4)
def test_a_conversation_computes_only_what_is_new(resources):
    engine, rng = Cached(resources), random.Random(2)
    prompt = tokens(rng, 150, 150)
    for turn in range(4):
        watched = engine.say(prompt, 7)
        counts = usage(watched)
        assert counts.cached == (0 if turn == 0 else counts.prompt - 20)
        prompt = (*prompt, *watched.tokens, *tokens(rng, 20, 20))
    assert engine.cached.reused_in_place == 3


@pytest.mark.sample(2)
def test_a_prompt_that_is_asked_again_computes_what_is_after_its_last_message(resources):
    engine, prompt = Cached(resources), tokens(random.Random(3), 200, 200)
    has_state = Layers(resources.network).has_state
    first = engine.say(prompt, 7, boundaries=(80, 190))
    again = engine.say(prompt, 7, boundaries=(80, 190))
    assert usage(again).cached == (190 if has_state else 199)
    assert again.tokens == first.tokens


@pytest.mark.thorough
def test_requests_that_start_together_compute_what_they_share_once(resources, tally):
    engine, rng = Cached(resources), random.Random(4)
    system = tokens(rng, 160, 160)
    prompts = [(*system, *tokens(rng, 30, 30)) for _ in range(4)]
    everyone = [engine.submit(engine_request(prompt, 6, boundaries=(160, 189))) for prompt in prompts]
    engine.finish(*everyone)
    assert [usage(watched).cached for watched in everyone] == [0, 160, 160, 160]
    plain = Stepper(resources)
    for watched, prompt in zip(everyone, prompts, strict=True):
        tally.compare(watched.tokens, reference(plain, prompt, 6))


@pytest.mark.thorough
@pytest.mark.checked(2)
def test_a_prompt_that_was_given_up_goes_on_where_it_was(resources, tally):
    engine, prompt = Cached(resources), tokens(random.Random(5), 400, 400)
    engine.say((1, 2, 3))
    gone = engine.submit(engine_request(prompt, 6, boundaries=(380,)))
    engine.step_until(lambda: gone.progress)
    computed = gone.progress[-1][0]
    assert computed < 380
    gone.generation.cancel()
    engine.step()
    assert engine.metrics.prefill is None
    again = engine.say(prompt, 6, boundaries=(380,))
    assert usage(again).cached == computed
    assert engine.cached.reused_in_place == 1
    tally.compare(again.tokens, reference(Stepper(resources), prompt, 6))


@pytest.mark.parametrize("concerns", ["a chunk", "a step"])
@pytest.mark.sample(8)
def test_what_failed_is_computed_again(resources, tally, concerns):
    breaks = FailsOnce(lambda shape: (shape[1] == 1) == (concerns == "a step"), nth=3)
    engine = Cached(resources, network=Wrapped(resources.network, breaks))
    prompt = tokens(random.Random(6), 400, 400)
    watched = engine.submit(engine_request(prompt, 6, boundaries=(100,)))
    engine.finish(watched)
    assert isinstance(watched.ending, Failed)
    tally.compare(engine.say(prompt, 6).tokens, reference(Stepper(resources), prompt, 6))


class FailingMethod:
    """Takes the place of a method of layers, and raises whenever `is_broken`.

    Attributes:
        failures: how often it has raised.
    """

    def __init__(self, layers: Layers, method: str) -> None:
        self.is_broken, self.failures = False, 0
        self._working = getattr(layers, method)
        setattr(layers, method, self)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self.is_broken:
            self.failures += 1
            raise Breakdown("broken on purpose")
        return self._working(*arguments, **options)


@pytest.mark.thorough
@pytest.mark.parametrize("moment", ["it decodes", "it is computed"])
def test_a_cache_that_fails_when_a_client_leaves_harms_nobody_else(resources, tally, moment):
    engine, rng = Cached(resources, clock=lambda: 0.0), random.Random(9)  # no step is owed to those beside
    compact = FailingMethod(engine.layers, "compact")
    prompts = [tokens(rng, 30, 30), tokens(rng, 40, 40)]
    beside = [engine.submit(engine_request(prompt, 30)) for prompt in prompts]
    engine.step_until(lambda: all(watched.tokens for watched in beside))
    drain = engine.submit(engine_request(tokens(rng, 400, 400), 30))
    engine.step_until(lambda: drain.tokens if moment == "it decodes" else drain.progress)
    drain.generation.cancel()
    compact.is_broken = True
    engine.step()
    compact.is_broken = False
    assert (engine.metrics.failures, engine.metrics.active_sequences, engine.metrics.prefill) == (1, 2, None)
    engine.finish(*beside)
    plain = Stepper(resources)
    for watched, prompt in zip(beside, prompts, strict=True):
        tally.compare(watched.tokens, reference(plain, prompt, 30))


@pytest.mark.parametrize("method", ["compact", "cut", "assemble"])
@pytest.mark.sample(10)
def test_after_a_cache_has_failed_it_is_used_again(resources, tally, method):
    engine, prompt = Cached(resources), tokens(random.Random(10), 200, 200)
    failing = FailingMethod(engine.layers, method)
    engine.say(prompt, 4, boundaries=(60, 190))
    for is_broken in (True, False):
        failing.is_broken = is_broken
        engine.say((*prompt[:70], 1, 1, 1), 4, boundaries=(60, 72))
        engine.say((*prompt[:70], 2), 4, boundaries=(60,))
    has_tails = engine.layers.has_state  # only a checkpoint cuts one
    assert failing.failures or (method == "cut" and not has_tails)
    again = engine.say(prompt, 4, boundaries=(60, 190))
    assert usage(again).cached > 0
    tally.compare(again.tokens, reference(Stepper(resources), prompt, 4))


@pytest.mark.thorough
def test_a_token_that_no_way_to_compute_gives_is_wrong(resources):
    """A token that a comparison lets pass as a tie inside of the network has to be said without a cache."""
    ids = tokens(random.Random(9), 90, 90)
    token = reference(Stepper(resources), ids, 1).ids[0]
    assert says_too(resources.network, ids, token)
    assert not says_too(resources.network, ids, token + 1)
    sure = Reference((token,), (1.0,))
    assert Tally().difference([token + 1], sure, lambda _: False) == (
        f"token 0 is {token + 1}, not {token}; its logit leads by 1.0000"
    )
    tied = Tally()
    assert tied.difference([token + 1], sure, lambda place: place == 0) is None
    assert tied.ties == 1


@pytest.mark.thorough
def test_restored_logits_are_the_computed_ones(resources):
    """All of them, not only the highest, from every kind of restore."""
    rng, metrics = random.Random(8), CacheMetrics()
    limits = EvictionLimits(budget_bytes=PLENTY)
    cache = PromptCache(Layers(resources.network), limits=limits, page_size=PAGE, metrics=metrics)
    known = [tokens(rng, 300, 300)]
    for _ in range(12):
        base = rng.choice(known)
        ids = (*base[: rng.choice([len(base), rng.randrange(150, 301)])], *tokens(rng, 1, 30))
        assert restored_difference(resources.network, cache, ids, (120, len(ids) - 1)) < 1e-4
        known.append(ids)
    assert metrics.reused_tokens > 1000
