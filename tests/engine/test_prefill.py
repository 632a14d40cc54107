"""Prompts are computed in chunks, up to their last token. How long these are: `test_pacing.py`."""

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import pytest
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from start_llm.core.events import Prefilling
from start_llm.engine.generation import Generation
from start_llm.engine.prefill import Prefill
from start_llm.engine.reply_writer import ReplyWriter
from start_llm.engine.sequence import EngineSequence
from tests.engine.harness import Breakdown, FailsOnce, Stepper, Wrapped, engine_request, seq_cache_of


def prefill_of(resources, prompt: Sequence[int], network=None) -> Prefill:
    generation = Generation(engine_request(prompt))
    reply = ReplyWriter(generation.request, resources.token_bytes, resources.eos_token_ids)
    sequence = EngineSequence(generation, reply, seq_cache_of(make_prompt_cache(resources.network)))
    return Prefill(replace(resources, network=network or resources.network), sequence)


def test_the_last_token_is_left_to_the_first_decode_step(resources):
    prefill = prefill_of(resources, range(100))
    computed = []
    with mx.stream(generation_stream):
        while not prefill.is_complete:
            computed.append(prefill.step(40))
    assert computed == [40, 40, 19]
    assert [layer.offset for layer in prefill.sequence.layer_caches] == [99, 99]


def test_a_prompt_of_one_token_is_complete_at_once(resources):
    prefill = prefill_of(resources, [7])
    assert prefill.is_complete
    assert prefill.step(64) == 0
    assert [layer.offset for layer in prefill.sequence.layer_caches] == [0, 0]


def test_every_chunk_is_reported(resources):
    prefill = prefill_of(resources, range(50))
    with mx.stream(generation_stream):
        prefill.step(30)
        prefill.step(30)
    assert prefill.sequence.generation.take(0) == [Prefilling(30, 50), Prefilling(49, 50)]


def test_a_chunk_that_fails_is_not_counted(resources):
    prefill = prefill_of(
        resources, range(50), Wrapped(resources.network, FailsOnce(lambda shape: shape[1] > 1, nth=2))
    )
    with mx.stream(generation_stream):
        prefill.step(20)
        with pytest.raises(Breakdown):
            prefill.step(20)
    assert prefill.done == 20


def test_a_prompt_of_one_token_is_answered(resources):
    stepper = Stepper(resources)
    watched = stepper.submit(engine_request([7], 5))
    stepper.finish(watched)
    assert len(watched.tokens) == 5
    assert watched.progress == []
