"""What of a prompt with images is computed again, and how often the tower looks."""

from __future__ import annotations

from pathlib import Path

import pytest

from start_llm.cache.layers import Layers
from start_llm.core.images import FIRST_IMAGE_TOKEN
from start_llm.engine.resources import EngineResources
from tests.cache.conversations import Cached
from tests.cache.disk import on_disk
from tests.vision.seeing import (
    FAMILIES,
    SeenPrompt,
    difference,
    greedy_reply,
    model_of,
    picture,
    prompt,
    resources_of,
    usage,
    words,
)

HYBRIDS = ["qwen3_vl", "qwen3_5", "gemma4_blocks"]
"""Pages to the token; recurrent layers; windows, and images that are computed as a whole."""


def question(family: str, number: int, seed: int = 2) -> SeenPrompt:
    """The same words about a picture of this number."""
    return prompt(model_of(family), words(40, 1), picture(number, 160, 128), words(9, 3) + words(16, seed))


def ends(seen: SeenPrompt) -> tuple[int, ...]:
    """Where messages end: in front of the picture, and shortly behind it."""
    start, end = seen.spans[0]
    return (start - 4, end + 6)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.sample(6)
def test_another_picture_with_the_same_words_shares_nothing_behind_its_start(family):
    engine = Cached(resources_of(family))
    first, other = question(family, 1), question(family, 2)
    engine.say(first.ids, 4, ends(first), images=first.runs)
    again = usage(engine.say(other.ids, 4, ends(other), images=other.runs))
    start = first.spans[0][0]
    has_state = Layers(resources_of(family).network).has_state
    assert again.cached == (start - 4 if has_state else start)
    assert engine.metrics.tower_runs == 2
    assert engine.cached.cut_images == 0


@pytest.mark.sample(6)
def test_the_same_image_behind_the_same_words_is_restored_and_not_encoded_again(family):
    engine = Cached(resources_of(family))
    first, other = question(family, 1), question(family, 1, seed=9)
    engine.say(first.ids, 4, ends(first), images=first.runs)
    again = usage(engine.say(other.ids, 4, ends(other), images=other.runs))
    assert again.cached >= first.spans[0][1]
    assert engine.metrics.tower_runs == 1


@pytest.mark.sample(12)
def test_the_next_turn_computes_what_is_new_and_needs_no_pixels(family):
    engine, seen = Cached(resources_of(family)), question(family, 1)
    first = engine.say(seen.ids, 7, images=seen.runs)
    blind = tuple(_without_pixels(run) for run in seen.runs)
    asked = (*seen.ids, *first.tokens, *model_of(family).tokenizer.encode(words(9), as_document=False))
    before = engine.metrics.prefilled_tokens
    again = usage(engine.say(asked, 7, images=blind))
    new = len(asked) - len(seen.ids) - 7
    assert again.cached == len(asked) - new
    assert engine.metrics.prefilled_tokens - before == new - 1  # a decode step computes the last one
    assert engine.metrics.tower_runs == 1


def _without_pixels(run):
    def nothing():
        raise AssertionError("nobody should decode this image")

    return type(run)(run.tokens, run.network_ids, run.grid, nothing)


@pytest.mark.thorough
def test_an_image_behind_other_words_is_computed_again_and_not_encoded_again(family):
    engine, seen = Cached(resources_of(family)), question(family, 1)
    moved = prompt(model_of(family), words(17, 5), picture(1, 160, 128), words(25, 2))
    engine.say(seen.ids, 4, images=seen.runs)
    again = usage(engine.say(moved.ids, 4, images=moved.runs))
    assert again.cached <= moved.spans[0][0]
    assert engine.metrics.tower_runs == 1


@pytest.mark.thorough
def test_what_the_tower_has_seen_is_kept_within_a_limit():
    resources = resources_of("qwen3_vl")
    seen = [question("qwen3_vl", number) for number in (1, 2, 1)]
    engine = Cached(resources, image_bytes=0)
    for sequence in seen:
        engine.say(
            (*sequence.ids[:-1], 5),
            2,
            images=sequence.runs,
            salt=bytes([len(engine.cache._store.seq_caches)]),
        )
    assert engine.metrics.tower_runs == 3
    assert engine.metrics.image_bytes == 0


def test_nobody_uses_what_the_tower_has_seen_for_another_tenant():
    engine, seen = Cached(resources_of("qwen3_vl")), question("qwen3_vl", 1)
    for salt in (b"one", b"two", b"one"):
        engine.say((*seen.ids, len(salt)), 2, images=seen.runs, salt=salt)
    assert engine.metrics.tower_runs == 2


# ------------------------------------------------------------------------------------------ parts of an image


@pytest.mark.thorough
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_restore_never_ends_inside_an_image(family):
    """Whatever part of an image is stored."""
    resources, seen = resources_of(family), question(family, 1)
    start, end = seen.spans[0]
    expected = greedy_reply(_fresh(resources, seen))
    for stored in (start + 1, (start + end) // 2, end - 1):
        engine = Cached(resources)
        _store(engine, seen, stored)
        watched = engine.say(seen.ids, 6, images=seen.runs, top_logprobs=1)
        assert usage(watched).cached <= start
        assert engine.cached.cut_images == 1
        assert difference(greedy_reply(watched), expected) < 1e-3


def _fresh(resources: EngineResources, seen: SeenPrompt):
    return Cached(resources).say(seen.ids, 6, images=seen.runs, top_logprobs=1)


def _store(engine: Cached, seen: SeenPrompt, length: int) -> None:
    """Keep caches that claim to hold so many tokens of a prompt, with garbage for the image's."""
    import mlx.core as mx
    from mlx_lm.generate import generation_stream

    start, _ = seen.spans[0]
    with mx.stream(generation_stream):
        opened = engine.cache.opener.open(seen.ids, b"", (start - 4,))
        caches = opened.seq_cache.caches
        done = 0
        for position in (start - 4, start, length):
            ids = [5 if token >= FIRST_IMAGE_TOKEN else token for token in seen.ids[done:position]]
            engine.loop._resources.network(mx.array([ids]), cache=caches)
            engine.cache.record_chunk(
                opened.seq_cache,
                seen.ids[done:position],
                keep_state=position in opened.checkpoint_positions,
            )
            done = position
        engine.cache.close(opened.seq_cache, caches, seen.ids[:length])


def test_state_is_kept_outside_of_images_alone():
    """A message that ends inside an image, which no client sends, has its state kept in front of it."""
    resources, seen = resources_of("qwen3_5"), question("qwen3_5", 1)
    start, end = seen.spans[0]
    engine = Cached(resources)
    engine.say(seen.ids, 3, (start + 3, end + 6), images=seen.runs)
    assert [checkpoint.position for checkpoint in engine.cache._store.checkpoints] == [start, end + 6]


# -------------------------------------------------------------------------------------------- after a restart


@pytest.mark.thorough
@pytest.mark.checked(2)
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_conversation_with_a_picture_goes_on_after_a_restart(family, tmp_path: Path):
    resources, seen = resources_of(family), question(family, 1)
    with on_disk(resources, tmp_path) as engine:
        first = engine.say(seen.ids, 7, ends(seen), images=seen.runs)
    asked = (*seen.ids, *first.tokens, 5, 6, 7)
    blind = tuple(_without_pixels(run) for run in seen.runs)
    with on_disk(resources, tmp_path) as engine:
        watched = engine.say(asked, 7, ends(seen), images=blind)
        assert usage(watched).cached == len(asked) - 3
        assert (engine.disk.hits, engine.metrics.tower_runs) == (1, 0)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_what_the_disk_has_of_half_an_image_ends_in_front_of_it(family, tmp_path: Path):
    resources, seen = resources_of(family), question(family, 1)
    start, end = seen.spans[0]
    with on_disk(resources, tmp_path) as engine:
        _store(engine, seen, (start + end) // 2)
    expected = greedy_reply(_fresh(resources, seen))
    with on_disk(resources, tmp_path) as engine:
        watched = engine.say(seen.ids, 6, images=seen.runs, top_logprobs=1)
        assert engine.disk.hits == 1
        assert usage(watched).cached == (start - 4 if family == "qwen3_5" else start)
        assert difference(greedy_reply(watched), expected) < 1e-3
