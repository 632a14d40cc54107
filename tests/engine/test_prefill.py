"""Prompts are computed in chunks of a bounded time, up to their last token."""

import itertools
import time
from collections.abc import Callable, Sequence

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from start_llm.core.events import Prefilling
from start_llm.engine.generation import Generation
from start_llm.engine.prefill import ChunkPacer, Prefill
from start_llm.engine.reply import ReplyWriter
from start_llm.engine.row import Row
from tests.engine.harness import Breakdown, FailsOnce, Stepper, Wrapped, job, strand_of

LONGEST_S = 0.3
Cost = Callable[[int, int], float]
"""Tokens of a chunk and tokens before it, to seconds."""


def network_cost(tokens_per_s: float, doubles_at: float = 1e9, overhead_s: float = 0.0) -> Cost:
    """A network whose tokens cost twice as much at position `doubles_at`."""
    return lambda tokens, before: (
        overhead_s + tokens * (1 + (before + tokens / 2) / doubles_at) / tokens_per_s
    )


def pace(cost: Cost, prompt: int, pacer: ChunkPacer | None = None) -> list[tuple[int, float]]:
    """Length and seconds of every chunk of a prompt."""
    pacer = pacer or ChunkPacer()
    chunks: list[tuple[int, float]] = []
    done = 0
    while done < prompt:
        tokens = min(pacer.length, prompt - done)
        seconds = cost(tokens, done)
        pacer.record(tokens, seconds)
        chunks.append((tokens, seconds))
        done += tokens
    return chunks


# ---------------------------------------------------------------------------------------------- chunk lengths


@given(
    tokens_per_s=st.floats(220, 200_000),
    doubles_at=st.floats(4_000, 1e6),
    overhead_s=st.floats(0, 0.04),
)
def test_no_chunk_lasts_longer_than_300_ms(tokens_per_s, doubles_at, overhead_s):
    chunks = pace(network_cost(tokens_per_s, doubles_at, overhead_s), 30_000)
    # The very first chunk is a guess; every other is measured.
    assert max(seconds for _, seconds in chunks[1:]) <= LONGEST_S


@given(tokens_per_s=st.floats(20, 220))
def test_a_slow_network_is_found_out_by_its_first_chunk(tokens_per_s):
    chunks = pace(network_cost(tokens_per_s), 2_000)
    assert max(seconds for _, seconds in chunks[1:]) <= LONGEST_S
    assert chunks[1][0] <= max(4, 0.23 * tokens_per_s)


def test_a_fast_network_gets_long_chunks():
    assert max(tokens for tokens, _ in pace(network_cost(50_000), 30_000)) == 2048


def test_chunks_use_the_time_they_have():
    """Short chunks cost throughput: two thirds of the target is the least that pays."""
    chunks = pace(network_cost(2_000, doubles_at=20_000, overhead_s=0.005), 20_000)
    settled = [seconds for _, seconds in chunks[4:-1]]
    assert min(settled) > 0.13


def test_chunks_shrink_as_the_context_makes_tokens_dearer():
    lengths = [tokens for tokens, _ in pace(network_cost(2_000, doubles_at=5_000), 40_000)]
    assert lengths[-2] < max(lengths) / 3


def test_chunks_grow_again_after_the_machine_was_busy():
    pacer = ChunkPacer()
    calm = network_cost(5_000)
    pace(calm, 20_000, pacer)
    usual = pacer.length
    pace(lambda tokens, before: 20 * calm(tokens, before), 5_000, pacer)
    assert pacer.length < usual / 10
    pace(calm, 20_000, pacer)
    assert pacer.length == usual


def test_a_hiccup_costs_a_few_short_chunks_and_no_more():
    pacer = ChunkPacer()
    pace(network_cost(5_000), 20_000, pacer)
    usual = pacer.length
    pacer.record(usual, 10.0)
    assert len(pace(network_cost(5_000), 4 * usual, pacer)) < 20


def test_the_short_end_of_a_prompt_does_not_shorten_the_next_one():
    pacer = ChunkPacer()
    pace(network_cost(5_000, overhead_s=0.05), 20_000, pacer)
    usual = pacer.length
    pacer.record(3, 0.05)
    assert pacer.length == usual


@given(st.lists(st.tuples(st.integers(1, 2048), st.floats(0, 100)), max_size=30))
def test_a_chunk_always_has_tokens_and_never_too_many(measured):
    pacer = ChunkPacer()
    for tokens, seconds in measured:
        pacer.record(tokens, seconds)
        assert 4 <= pacer.length <= 2048


# ---------------------------------------------------------------------------------------------------- one row


def prefill_of(machinery, prompt: Sequence[int], network=None) -> Prefill:
    generation = Generation(job(prompt))
    reply = ReplyWriter(generation.job, machinery.token_bytes, machinery.end_tokens)
    row = Row(generation, reply, strand_of(make_prompt_cache(machinery.network)))
    return Prefill(network or machinery.network, row, ChunkPacer())


def test_the_last_token_is_left_to_the_first_decode_step(machinery):
    prefill = prefill_of(machinery, range(100))
    computed = []
    with mx.stream(generation_stream):
        while not prefill.is_complete:
            computed.append(prefill.step(40))
    assert computed == [40, 40, 19]
    assert [layer.offset for layer in prefill.row.cache] == [99, 99]


def test_a_prompt_of_one_token_is_complete_at_once(machinery):
    prefill = prefill_of(machinery, [7])
    assert prefill.is_complete
    assert prefill.step(64) == 0
    assert [layer.offset for layer in prefill.row.cache] == [0, 0]


def test_every_chunk_is_reported(machinery):
    prefill = prefill_of(machinery, range(50))
    with mx.stream(generation_stream):
        prefill.step(30)
        prefill.step(30)
    assert prefill.row.generation.take(0) == [Prefilling(30, 50), Prefilling(49, 50)]


def test_a_chunk_that_fails_is_not_counted(machinery):
    prefill = prefill_of(
        machinery, range(50), Wrapped(machinery.network, FailsOnce(lambda shape: shape[1] > 1, nth=2))
    )
    with mx.stream(generation_stream):
        prefill.step(20)
        with pytest.raises(Breakdown):
            prefill.step(20)
    assert prefill.done == 20


def test_a_prompt_of_one_token_is_answered(machinery):
    stepper = Stepper(machinery)
    watched = stepper.submit(job([7], 5))
    stepper.finish(watched)
    assert len(watched.tokens) == 5
    assert watched.progress == []


def test_chunks_follow_the_speed_of_the_network_that_runs(machinery):
    """At a millisecond a token, 230 tokens are the 0.23 seconds that a chunk aims at."""
    slow = Wrapped(machinery.network, lambda shape: time.sleep(shape[1] / 1000))
    stepper = Stepper(machinery, network=slow)
    watched = stepper.submit(job(range(1000), 1))
    stepper.finish(watched)
    ends = [0, *(done for done, _ in watched.progress)]
    lengths = [end - start for start, end in itertools.pairwise(ends)]
    assert lengths[0] == 64
    assert 64 < max(lengths) <= 230
