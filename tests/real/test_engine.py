"""The real model in an engine: its cache and its batches change nothing, past the sliding window too."""

from __future__ import annotations

import bisect
import inspect
import textwrap
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from start_llm.engine.resources import EngineResources
from start_llm.models.loader import load
from tests.cache.conversations import Cached, Tokens, reference, restored_difference
from tests.engine.harness import Stepper, Wrapped, engine_request, uncached_resources
from tests.real.prompts import PROMPTS
from tests.real.replies import LENGTH
from tests.ties import Tally

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]

WINDOW = 512
LONG = 640
"""Tokens of a prompt, of which the engine computes all but the last one beforehand."""
MOST_DIFFERENCE = 1e-4
TOGETHER = ["Python", "JSON", "emoji", "prose"]


@pytest.fixture(scope="module")
def resources(folder: Path) -> EngineResources:
    """No token ends a reply: it is as long as it is asked to be."""
    model = load(folder)
    return uncached_resources(
        model.network, model.tokenizer.token_bytes, frozenset(), max_sequences=len(TOGETHER), batches=True
    )


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def source(tokenizer: Tokenizer) -> Tokens:
    """Code of Python's library."""
    return tuple(tokenizer.encode(inspect.getsource(bisect)).ids)


@pytest.fixture(scope="module")
def engine(resources: EngineResources, source: Tokens) -> Cached:
    """It has answered a long prompt, in which a message ends 100 tokens before the last one."""
    engine = Cached(resources)
    engine.say(source[:LONG], 4, (LONG - 100, LONG))
    return engine


@pytest.mark.parametrize(
    "kept", [LONG - 1, LONG - 100], ids=["a conversation goes on", "a message is edited"]
)
def test_logits_behind_a_restored_prompt_are_those_of_a_computed_one(
    kept: int, resources: EngineResources, engine: Cached, source: Tokens
):
    before = engine.cached.reused_tokens
    prompt = (*source[:kept], *source[-40:])
    difference = restored_difference(resources.network, engine.cache, prompt, (len(prompt) - 1,))
    assert engine.cached.reused_tokens - before >= kept > WINDOW
    assert difference < MOST_DIFFERENCE


@pytest.mark.thorough
def test_the_same_holds_four_windows_deep(resources: EngineResources, tokenizer: Tokenizer):
    source = tuple(tokenizer.encode(inspect.getsource(textwrap)).ids)
    engine, kept = Cached(resources, longest_chunk=WINDOW), 4 * WINDOW
    engine.say(source[: kept + 1], 1, (kept,))
    prompt = (*source[:kept], *source[-100:])
    difference = restored_difference(resources.network, engine.cache, prompt, (len(prompt) - 1,))
    assert engine.cached.reused_tokens >= kept
    assert difference < MOST_DIFFERENCE


def test_four_streams_at_once_say_what_each_says_alone(resources: EngineResources, tokenizer: Tokenizer):
    shapes: list[tuple[int, ...]] = []
    together = Stepper(resources, network=Wrapped(resources.network, shapes.append))
    prompts = [tuple(tokenizer.encode(PROMPTS[name]).ids) for name in TOGETHER]
    streams = [together.submit(engine_request(prompt, LENGTH)) for prompt in prompts]
    together.finish(*streams)
    assert shapes.count((len(TOGETHER), 1)) > LENGTH / 2
    alone, tally = Stepper(resources), Tally()
    for prompt, stream in zip(prompts, streams, strict=True):
        tally.compare(stream.tokens, reference(alone, prompt, LENGTH))
    assert tally.tokens > 0.9 * len(TOGETHER) * LENGTH
