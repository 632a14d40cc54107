"""What fails with an image fails alone, and what never fits is reported."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from start_llm.core.events import Failed, Finished
from start_llm.core.images import FIRST_IMAGE_TOKEN
from start_llm.core.sampling import Sampling
from start_llm.engine.sequence import EngineSequence
from tests.cache.conversations import Cached
from tests.engine.harness import Breakdown, Stepper, Undrafted, engine_request
from tests.vision.seeing import SeenPrompt, model_of, picture, prompt, resources_of, usage, words

FAMILY = "qwen3_vl"


class Breaking:
    """Eyes that raise in this method, once."""

    def __init__(self, vision: Any, method: str) -> None:
        self._vision = vision
        self._method = method
        self._is_broken = True

    def __getattr__(self, name: str) -> Any:
        if name == self._method and self._is_broken:
            self._is_broken = False
            return self._raise
        return getattr(self._vision, name)

    def _raise(self, *_: Any) -> None:
        raise Breakdown("broken on purpose")


def seen() -> SeenPrompt:
    return prompt(model_of(FAMILY), words(20), picture(1, 160, 128), words(10))


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["see", "compute"])
def test_a_failure_with_an_image_fails_its_request_alone(method):
    resources = resources_of(FAMILY)
    broken: Any = Breaking(resources.vision, method)
    engine, asked = Cached(replace(resources, vision=broken)), seen()
    beside = engine.submit(engine_request([5, 6, 7] * 30, 20))
    engine.step_until(lambda: beside.tokens)
    watched = engine.submit(asked.request())
    engine.finish(watched, beside)
    assert watched.ending == Failed("The engine failed: Breakdown: broken on purpose")
    assert isinstance(beside.ending, Finished)
    assert engine.metrics.failures == 1
    again = engine.say(asked.ids, images=asked.runs)
    assert usage(again).completion == 4


def test_an_image_that_cannot_be_decoded_fails_its_request_alone():
    asked, engine = seen(), Stepper(resources_of(FAMILY))

    def unreadable() -> Any:
        raise Breakdown("no picture")

    runs = tuple(replace(run, inputs=unreadable) for run in asked.runs)
    watched = engine.submit(engine_request(asked.ids, images=runs))
    beside = engine.submit(engine_request([5, 6, 7]))
    engine.finish(watched, beside)
    assert watched.ending == Failed("The engine failed: Breakdown: no picture")
    assert isinstance(beside.ending, Finished)


def test_images_are_refused_where_they_cannot_be_read():
    asked = seen()
    (run,) = asked.runs
    cut = (*asked.ids[: asked.spans[0][1] - 1], 5)
    for resources, ids, runs, reason in (
        (replace(resources_of(FAMILY), vision=None), asked.ids, (run,), "this model reads no images"),
        (resources_of(FAMILY), asked.ids, (), "an image that the request does not bring"),
        (resources_of(FAMILY), cut, (run,), "only a part of an image's tokens"),
    ):
        engine = Stepper(resources)
        watched = engine.submit(engine_request(ids, images=runs))
        engine.finish(watched)
        assert isinstance(watched.ending, Failed)
        assert reason in watched.ending.message


def test_a_prompt_that_ends_with_an_image_is_no_request():
    asked = seen()
    with pytest.raises(ValueError, match="must not end with an image"):
        engine_request(asked.ids[: asked.spans[0][1]], images=asked.runs)


# ------------------------------------------------------------------------------------ tokens that name images


def test_what_processors_and_guides_see_are_the_networks_ids():
    """Penalties look ids up in the logits."""
    asked, engine = seen(), Stepper(resources_of(FAMILY))
    known: list[int] = []

    class Guide(Undrafted):
        def advance(self, tokens: Any) -> None:
            known.extend(tokens)

        def allowed(self) -> bytes:
            return bytes([1]) * model_of(FAMILY).vocabulary

    penalised = Sampling(
        temperature=0, repetition_penalty=1.3, repetition_context_size=len(asked.ids), presence_penalty=0.5
    )
    watched = engine.submit(asked.request(12, sampling=penalised, guide=Guide()))
    engine.step_until(lambda: len(watched.tokens) > 3)
    (context,) = engine.loop.executor.running.decoder.groups[0]._passes._logits._contexts.values()
    (sequence,) = engine.loop.executor.running.decoder.sequences
    context_ids: Any = context.tokens.tolist()
    assert context_ids == sequence.network_ids[: len(context_ids)]
    engine.finish(watched)
    assert isinstance(watched.ending, Finished)
    assert known == watched.tokens[: len(known)]
    assert len(known) >= 11


def test_a_sequence_tells_the_networks_ids():
    asked, engine = seen(), Stepper(resources_of(FAMILY))
    watched = engine.submit(asked.request(6))
    engine.step_until(lambda: watched.tokens)
    sequence: EngineSequence = engine.loop.executor.running.decoder.sequences[0]
    ids = sequence.network_ids
    assert max(ids) < FIRST_IMAGE_TOKEN
    start, end = asked.spans[0]
    assert ids[start:end] == list(asked.runs[0].network_ids)
    assert ids[:start] + ids[end:] == sequence.tokens[:start] + sequence.tokens[end:]
    assert model_of(FAMILY).tokenizer.token_bytes(asked.runs[0].tokens[0]) == b""


def test_chunks_of_images_tell_nothing_of_chunks_of_text():
    engine, asked = Stepper(resources_of(FAMILY), longest_chunk=2048), seen()
    recorded: list[int] = []
    pacer = engine.loop.time._pacer
    record = pacer.record
    pacer.record = lambda chunk: (recorded.append(chunk.tokens), record(chunk))[1]
    watched = engine.submit(asked.request(2))
    engine.finish(watched)
    start, end = asked.spans[0]
    assert recorded == [start, len(asked.ids) - 1 - end]
    assert engine.metrics.tower_s >= 0
