"""Random conversations with images say what they say without a cache."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cache.conversations import PLENTY, Cached, Talkers, memory_for, reference, talk
from tests.cache.disk import on_disk
from tests.engine.harness import Stepper
from tests.slices import rounds
from tests.ties import Tally
from tests.vision.seeing import FAMILIES, model_of, pictures, resources_of

ROUNDS = rounds(12, checked=4)
LIVES = rounds(4, checked=2)


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    whole = Tally()
    yield whole
    whole.assert_ties_are_rare()


@pytest.mark.parametrize("room", [None, 600], ids=["plenty of memory", "memory for two prompts"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.thorough
@pytest.mark.product
@pytest.mark.checked(12)
def test_random_conversations_with_images_are_what_they_are_without_a_cache(family, room, tally):
    resources = resources_of(family)
    engine = Cached(resources, PLENTY if room is None else memory_for(resources, room))
    plain = Stepper(resources)
    talkers = Talkers(random.Random(7), pictures(model_of(family), 4))
    turns = [turn for _ in range(ROUNDS) for turn in talk(engine, talkers)]
    for turn in turns:
        assert turn.watched.generation.cancelled or len(turn.watched.tokens) == turn.length
        tally.compare(turn.watched.tokens, reference(plain, turn.prompt, turn.length, turn.images))
    assert engine.metrics.failures == 0
    assert sum(bool(turn.images) for turn in turns) > len(turns) / 2
    assert engine.cached.reused_tokens > engine.metrics.prefilled_tokens / 10
    assert 1 < engine.metrics.tower_runs <= 4, "each picture is looked at once"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.long
def test_random_conversations_with_images_outlive_restarts(family, tally, tmp_path: Path):
    resources = resources_of(family)
    plain = Stepper(resources)
    talkers = Talkers(random.Random(11), pictures(model_of(family), 4))
    restored = 0
    for round_ in range(LIVES):
        budget = {} if round_ % 2 else {"budget": memory_for(resources, 600)}
        with on_disk(resources, tmp_path, idle_s=0, **budget) as engine:
            for _ in range(4):
                for turn in talk(engine, talkers):
                    assert turn.watched.generation.cancelled or len(turn.watched.tokens) == turn.length
                    tally.compare(
                        turn.watched.tokens, reference(plain, turn.prompt, turn.length, turn.images)
                    )
            assert engine.metrics.failures == 0
            restored += engine.disk.restored_tokens
    assert restored > 100 * (LIVES - 1)
