"""Quantised pages may hold images: they are restored near to what they were, for the same image alone."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from start_llm.cache.layers import Layers
from tests.cache.conversations import Cached, likeliest
from tests.cache.disk import on_disk
from tests.cache.test_kv_bits import EIGHT, interrupted, packed_runs
from tests.vision.seeing import SeenPrompt, model_of, picture, prompt, resources_of, usage, words

BOUNDS = {"qwen3_vl": 2e-3, "qwen3_5": 1e-4, "gemma3": 4e-2, "gemma4_blocks": 1e-2}
"""Mean difference of log-probabilities of the likeliest tokens, by family, in networks with random weights.

Shifted positions; recurrent layers too; windows; images that are computed as a whole.
"""


@pytest.fixture(params=BOUNDS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def question(family: str, number: int) -> SeenPrompt:
    return prompt(model_of(family), words(60, 1), picture(number, 160, 128), words(60, 2))


def rested(engine: Cached, seen: SeenPrompt) -> None:
    """A conversation whose pages are quantised."""
    interrupted(engine, seen.ids, images=seen.runs)
    (_, end), runs = seen.spans[0], packed_runs(engine)
    assert runs
    assert max(run.span[1] for run in runs) > end, "the image is in no page"


def asked(engine: Cached, seen: SeenPrompt) -> dict[int, float]:
    """The likeliest tokens behind a prompt whose image is restored."""
    longer = seen.then(5, 6, 7)
    looks = engine.metrics.tower_runs
    watched = engine.say(longer.ids, 1, images=longer.runs, top_logprobs=20)
    assert usage(watched).cached > seen.spans[0][1]
    assert engine.metrics.tower_runs == looks
    return likeliest(watched)


@pytest.mark.sample(4)
def test_a_restored_image_says_nearly_the_same(family):
    seen, resources = question(family, 1), resources_of(family)
    exact, quantised = Cached(resources), Cached(resources, kv=EIGHT)
    for engine in (exact, quantised):
        rested(engine, seen)
    truth, restored = asked(exact, seen), asked(quantised, seen)
    both = truth.keys() & restored.keys()
    assert len(both) > 15
    mean = sum(math.exp(truth[token]) * abs(truth[token] - restored[token]) for token in both)
    assert 0 < mean <= BOUNDS[family]


@pytest.mark.thorough
@pytest.mark.checked(2)
def test_another_image_shares_no_quantised_page(family):
    engine, first, other = Cached(resources_of(family), kv=EIGHT), question(family, 1), question(family, 2)
    rested(engine, first)
    again = usage(engine.say(other.ids, 1, images=other.runs))
    start = first.spans[0][0]
    assert again.cached == (0 if Layers(resources_of(family).network).has_state else start)
    assert engine.metrics.tower_runs == 2


@pytest.mark.thorough
def test_the_disk_gives_what_memory_gives(family, tmp_path: Path):
    seen, resources = question(family, 1), resources_of(family)
    memory = Cached(resources, kv=EIGHT)
    rested(memory, seen)
    with on_disk(resources, tmp_path, kv=EIGHT) as engine:
        rested(engine, seen)
    with on_disk(resources, tmp_path, kv=EIGHT) as engine:
        assert asked(engine, seen) == asked(memory, seen)
        assert (engine.disk.hits, engine.metrics.tower_runs) == (1, 0)
