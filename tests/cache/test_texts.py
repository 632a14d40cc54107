"""Prompts without messages on real networks: where an edited one goes on, and that it says the same there."""

from __future__ import annotations

import random

import pytest

from start_llm.cache.eviction import EvictionLimits
from start_llm.cache.layers import Layers
from start_llm.cache.prompt_cache import PromptCache
from start_llm.models.loader import load
from start_llm.telemetry.metrics import CacheMetrics
from tests.cache.conversations import PAGE, PLENTY, VOCABULARY, Tokens, restored_difference, tokens
from tests.cache.integrity import check_cache
from tests.conftest import TinyModel

NEAR = 1e-4
LENGTH, STEP, LEAST = 700, 256, 16
"""Tokens of a text, between two of its states, and that a state has to save."""
EDITS = (650, 411, 257, 256, 255, 100, 3)
NETWORKS = {
    "windows as long as the text": ("gemma3_text", {"sliding_window": 1024}),
    "windows as long as a step": ("gemma3_text", {"sliding_window": STEP}),
    "recurrent": ("qwen3_5", {}),
}


def edited(rng: random.Random, text: Tokens, place: int, word: int) -> Tokens:
    """`word` is in no text."""
    return (*text[:place], VOCABULARY + word, *tokens(rng, 40, 40))


@pytest.mark.thorough
@pytest.mark.checked(2)
@pytest.mark.parametrize("name", NETWORKS)
def test_an_edited_text_goes_on_from_the_edit_and_says_the_same(name, tiny_model: TinyModel):
    """Chunks of 64 tokens leave less beside a window than lies between two states."""
    family, config = NETWORKS[name]
    network = load(tiny_model(family, hidden=64, layers=2, **config)).network
    limits, metrics = EvictionLimits(budget_bytes=PLENTY), CacheMetrics()
    cache = PromptCache(Layers(network), limits=limits, page_size=PAGE, metrics=metrics)
    rng = random.Random(2)
    text = tokens(rng, LENGTH, LENGTH)
    assert restored_difference(network, cache, text, ()) < NEAR
    for place in EDITS:
        for again in range(2):
            ids = edited(rng, text, place, again)
            known = cache.opener.peek(ids, b"", ()).tokens
            at_states = name == "recurrent" and (not again or place % STEP < LEAST)
            assert known == place or (at_states and place // STEP * STEP <= known < place)
            assert restored_difference(network, cache, ids, ()) < NEAR
    assert cache.opener.peek(text, b"", ()).tokens == LENGTH - 1
    check_cache(cache)
