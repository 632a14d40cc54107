"""After a restart an engine says what it would have said, and computes only what is new."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from start_llm.core.events import Finished, Usage
from start_llm.engine.resources import EngineResources
from tests.cache.conversations import Talkers, memory_for, reference, talk, tokens
from tests.cache.disk import on_disk, resources_of
from tests.conftest import TinyModel
from tests.engine.harness import Stepper, Watched
from tests.slices import rounds
from tests.ties import Tally

FAMILIES = ["qwen3_5", "gemma3_text", "qwen3", "glm4_moe_lite", "gpt_oss"]
"""Recurrent layers; windows of 128; plain; latent; windows of 128 with sinks."""


@pytest.fixture(scope="module", params=FAMILIES)
def resources(request: pytest.FixtureRequest, tiny_model: TinyModel) -> EngineResources:
    return resources_of(tiny_model, request.param)


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    whole = Tally()
    yield whole
    whole.assert_ties_are_rare()


def usage(watched: Watched) -> Usage:
    assert isinstance(watched.ending, Finished)
    return watched.ending.usage


@pytest.mark.sample(8)
@pytest.mark.product
@pytest.mark.parametrize("is_in_place", [True, False], ids=["in place", "staged"])
def test_a_conversation_goes_on_after_a_restart(resources, tally, tmp_path: Path, is_in_place: bool):
    rng, plain = random.Random(1), Stepper(resources)
    prompt = tokens(rng, 300, 300)
    for turn in range(3):
        with on_disk(resources, tmp_path, is_in_place=is_in_place) as engine:
            watched = engine.say(prompt, 7, boundaries=(100, len(prompt) - 4))
            assert usage(watched).cached == (0 if turn == 0 else len(prompt) - 20)
            assert engine.disk.hits == (turn > 0)
            tally.compare(watched.tokens, reference(plain, prompt, 7))
        prompt = (*prompt, *watched.tokens, *tokens(rng, 20, 20))


@pytest.mark.thorough
def test_random_conversations_with_restarts_are_what_they_are_without_a_cache(
    resources, tally, tmp_path: Path
):
    plain, talkers = Stepper(resources), Talkers(random.Random(11))
    restored = 0
    for round_ in range(rounds(8, checked=4)):
        budget = {} if round_ % 2 else {"budget": memory_for(resources, 600)}
        with on_disk(resources, tmp_path, idle_s=0, **budget) as engine:
            for _ in range(4):
                for turn in talk(engine, talkers):
                    assert turn.watched.generation.cancelled or len(turn.watched.tokens) == turn.length
                    tally.compare(turn.watched.tokens, reference(plain, turn.prompt, turn.length))
            assert engine.metrics.failures == 0
            restored += engine.disk.restored_tokens
            assert set(engine.disk.rejected) <= {"missing"}, "a newer file may have replaced it"
    assert restored > 1000
