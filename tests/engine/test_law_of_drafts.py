"""Random requests, cancelled, preempted and evicted: replies with drafts are those without."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from start_llm.core.adapters import BASE_MODEL
from start_llm.core.engine_request import EngineRequest
from start_llm.core.limits import TimeLimits
from start_llm.core.sampling import Sampling
from start_llm.engine.pass_times import PassTimes
from start_llm.engine.resources import EngineResources
from start_llm.models.adapter_loader import Adapters
from start_llm.models.loader import load
from tests import tiny_adapters
from tests.cache.conversations import PAGE, Cached
from tests.cache.disk import on_disk
from tests.conftest import TinyModel
from tests.engine.drafted import Drafting, Outcome, Play, almost
from tests.engine.harness import GREEDY, Stepper, engine_request, uncached_resources
from tests.engine.test_drafts import FAMILIES
from tests.vision.seeing import model_of, picture, pictures, prompt, resources_of, words

pytestmark = [pytest.mark.product, pytest.mark.sample(3)]


def text_resources(folder: Path) -> EngineResources:
    model = load(folder)
    return uncached_resources(
        model.network, model.tokenizer.token_bytes, frozenset(), max_sequences=4, batches=True
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_random_requests_are_answered_the_same(family: str, tiny_model: TinyModel):
    resources = text_resources(tiny_model(family, hidden=128, layers=2))
    outcome = Outcome()
    for seed in range(2):
        Play(resources, seed, outcome).run(8)
    assert not outcome.wrong
    assert outcome.requests == 16
    assert outcome.accepted > 50


@pytest.mark.long
def test_random_requests_with_images_are_answered_the_same():
    outcome = Outcome()
    Play(resources_of("qwen3_5"), 1, outcome, pictures(model_of("qwen3_5"), 3)).run(6)
    assert not outcome.wrong
    assert outcome.accepted > 10


PROMPT = tuple(range(3, 130))
SAMPLINGS = [GREEDY, Sampling(temperature=0.8, top_k=5, seed=11)]


def drafting(resources: EngineResources, **more: Any) -> Cached:
    return Cached(resources, gain=Drafting(PassTimes()), **more)


def accepted(engine: Cached) -> int:
    gain = engine.loop.executor._resources.gain
    assert gain
    return gain.metrics.accepted_tokens


def undrafted(resources: EngineResources, request: EngineRequest) -> list[int]:
    engine = Stepper(resources)
    watched = engine.submit(request)
    engine.finish(watched)
    return watched.tokens


def drafted(engine: Cached, request: EngineRequest) -> list[int]:
    watched = engine.submit(request)
    engine.finish(watched)
    return watched.tokens


def hinted(request: EngineRequest, reply: Sequence[int], seed: int = 1) -> EngineRequest:
    """The request, with a text that its reply repeats for the most part."""
    texts = (almost(request.prompt.ids, reply, random.Random(seed)),)
    return replace(request, draft_texts=texts)


@pytest.mark.thorough
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
def test_replies_under_adapters_are_the_same_and_other_ones_than_those_of_the_base(
    tiny_model: TinyModel, tmp_path: Path, sampling: Sampling
):
    """What was said under one is not looked up under another: their salts differ."""
    folder = tiny_model("qwen3", hidden=128, layers=2)
    model = load(folder)
    adapters = Adapters(model.network)
    for seed, name in enumerate(("a", "b")):
        tiny_adapters.build(folder, tmp_path / name, seed)
        adapters.load(name, tmp_path / name)
    resources = replace(text_resources(folder), network=model.network, mount=adapters.mount)
    stacks = [BASE_MODEL, adapters.stack("a"), adapters.stack("b")]
    requests = [
        engine_request(PROMPT, 40, sampling, adapters=stack, salt=stack.scope(b"me")) for stack in stacks
    ]
    expected = [undrafted(resources, request) for request in requests]
    assert len({tuple(tokens) for tokens in expected}) == 3
    engine = drafting(resources)
    for request, tokens in zip(requests, expected, strict=True):
        assert drafted(engine, request) == tokens
    assert accepted(engine) == 0, "each of them is the first one under its adapters"
    for request, tokens in zip(requests, expected, strict=True):
        assert drafted(engine, request) == tokens
    assert accepted(engine) > 60


@pytest.mark.thorough
@pytest.mark.checked(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_that_comes_back_from_the_disk_goes_on_the_same(
    family: str, tiny_model: TinyModel, tmp_path: Path
):
    """Its first reply was drafted, another one was given up in mid-draft, and so is what follows."""
    resources = text_resources(tiny_model(family, hidden=128, layers=2))
    first = engine_request(PROMPT, 40, boundaries=(100,))
    reply = undrafted(resources, first)
    second = engine_request((*PROMPT, *reply, *range(200, 260)), 40, boundaries=(100, len(PROMPT) + 40))
    follows = undrafted(resources, second)
    with on_disk(resources, tmp_path, gain=Drafting(PassTimes())) as engine:
        whole = engine.submit(hinted(first, reply, 1))
        engine.finish(whole)
        given_up = engine.submit(hinted(first, reply, 2))
        engine.step_until(lambda: len(given_up.tokens) > 1)
        assert given_up.ending is None
        given_up.generation.cancel()
        engine.step()
        assert whole.tokens == reply
        assert given_up.tokens == reply[: len(given_up.tokens)]
    gain = Drafting(PassTimes())
    with on_disk(resources, tmp_path, gain=gain) as engine:
        resumed = engine.submit(hinted(second, follows))
        engine.finish(resumed)
        assert engine.disk.restored_tokens > 50
    assert resumed.tokens == follows
    assert gain.metrics.accepted_tokens > 10


def pages_of(engine: Cached, most: int) -> dict[bytes, tuple[int, ...]]:
    """Tokens of the pages that end within so many, by their keys."""
    return {page.key: page.tokens for page in engine.cache._store.tree.pages() if page.end <= most}


def kv_of(engine: Cached, most: int) -> list[mx.array]:
    (kept,) = engine.cache._store.seq_caches
    return [array[..., :most, :] for leaf in kept.readable() for array in (leaf.keys, leaf.values)]


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["qwen3", "glm4_moe_lite"])
def test_the_pages_have_the_same_keys_tokens_and_kv_as_without_drafts(family: str, tiny_model: TinyModel):
    resources = text_resources(tiny_model(family, hidden=128, layers=2))
    request = engine_request(PROMPT, 100)
    reply, most = undrafted(resources, request), len(PROMPT) + 84
    plain, drafts = Cached(resources), drafting(resources)
    for engine in (plain, drafts):
        assert drafted(engine, hinted(request, reply)) == reply
    assert accepted(drafts) > 10
    assert pages_of(plain, most) == pages_of(drafts, most)
    assert len(pages_of(plain, most)) == most // PAGE
    for ours, theirs in zip(kv_of(drafts, most), kv_of(plain, most), strict=True):
        assert mx.allclose(ours, theirs, atol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["qwen3_5", "gemma3"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
def test_a_reply_about_images_is_the_same_though_it_is_interrupted(family: str, sampling: Sampling):
    """Behind two images, which move the positions in one of the families."""
    resources, model = resources_of(family), model_of(family)
    seen = prompt(model, f"Look:{words(30, 1)}", picture(1, 96, 128), words(40, 2), picture(2), words(9, 3))
    request = seen.request(40, sampling=sampling)
    expected = undrafted(resources, request)
    ticks = count()
    engine = drafting(
        resources,
        clock=lambda: next(ticks) / 10,
        max_sequences=1,
        time_limits=TimeLimits(preempt_after_s=1),
    )
    reply = engine.submit(hinted(request, expected))
    engine.step_until(lambda: len(reply.tokens) > 3)
    other = engine.submit(engine_request([5, 6] * 20, 9))
    engine.finish(reply, other)
    assert engine.metrics.preemptions
    assert reply.tokens == expected
    assert accepted(engine) > 10
