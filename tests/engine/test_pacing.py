"""How long the chunks of a prompt are: as fast as can be alone, and short beside running replies."""

import itertools
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from start_llm.core.limits import STALL_S
from start_llm.engine.pacing import LONGEST_CHUNK, Chunk, ChunkPacer, ChunkTimes
from start_llm.engine.step_plan import PlanClock
from start_llm.engine.time_share import EngineTime, TimeShare
from start_llm.telemetry.metrics import EngineMetrics
from tests.engine.harness import Stepper, Wrapped, engine_request, uncached_resources
from tests.engine.test_guards import Counting
from tests.engine.test_turns import Clock

Cost = Callable[[int, int], float]
"""Tokens of a chunk and tokens before it, to seconds."""


def device(fixed: float = 0.0, token: float = 1e-4, before: float = 0.0, pair: float = 0.0) -> Cost:
    """Seconds of any chunk, of each token, of each token before it, and of each pair."""
    return lambda tokens, done: fixed + tokens * token + done * before + tokens * done * pair


LAPTOPS = {
    "dense, slow": device(0.05, 6e-3, 2e-6, 4e-9),
    "dense, fast": device(0.012, 1.6e-3, 3.7e-7, 4e-10),
    "many experts": device(0.25, 6e-4, 2.5e-7, 4e-10),
    "MLA": device(0.25, 6e-4, 3e-6, 4e-10),
    "a data centre's": device(0.006, 4e-5, 5e-8, 1e-11),
}


def time_limits(
    cost: Cost, prompt: int, pacer: ChunkPacer | None = None, *, stalls: bool = False
) -> list[tuple[int, float]]:
    """Length and seconds of every chunk of a prompt."""
    pacer = pacer or ChunkPacer()
    chunks: list[tuple[int, float]] = []
    done = 0
    while done < prompt:
        tokens = min(pacer.length(done, stalls=stalls), prompt - done)
        seconds = cost(tokens, done)
        pacer.record(Chunk(tokens, done, seconds))
        chunks.append((tokens, seconds))
        done += tokens
    return chunks


def taken(chunks: list[tuple[int, float]]) -> float:
    return sum(seconds for _, seconds in chunks)


def bare(cost: Cost, prompt: int) -> float:
    """Seconds of chunks of 2,048 tokens, as in mlx_lm."""
    return sum(cost(min(2048, prompt - done), done) for done in range(0, prompt, 2048))


def known(cost: Cost) -> ChunkPacer:
    """A pacer that has seen a long prompt."""
    pacer = ChunkPacer()
    time_limits(cost, 8_000, pacer)
    return pacer


# -------------------------------------------------------------------------------------------------- alone


@pytest.mark.parametrize("name", LAPTOPS)
@pytest.mark.parametrize("prompt", [20_000, 100_000])
def test_alone_a_prompt_is_computed_as_fast_as_in_the_longest_chunks(name, prompt):
    assert bare(LAPTOPS[name], prompt) / taken(time_limits(LAPTOPS[name], prompt)) > 0.95


@pytest.mark.parametrize("name", LAPTOPS)
def test_alone_a_chunk_that_is_no_faster_for_its_length_ends_soon(name):
    """Requests that come meanwhile wait for it."""
    lasting = [seconds for _, seconds in time_limits(LAPTOPS[name], 40_000)[2:]]
    assert max(lasting) < 3.5


@pytest.mark.parametrize("before", [0, 100_000])
def test_a_device_whose_fixed_cost_is_longer_than_a_stall_gets_long_chunks(before):
    """`ChunkPacer` once divided tokens by seconds, and came down to chunks of four tokens here."""
    cost = device(0.4, 6e-4, 3e-6)
    pacer = ChunkPacer()
    time_limits(lambda tokens, done: cost(tokens, before + done), 40_000, pacer)
    assert pacer.length(before + 40_000, stalls=False) >= 1536
    assert pacer.length(before + 40_000, stalls=True) >= 256


@settings(deadline=None)  # a thousand chunks on the slowest
@given(
    fixed=st.floats(0, 1),
    token=st.floats(1e-6, 0.05),
    before=st.floats(0, 1e-5),
    pair=st.floats(0, 1e-8),
)
@example(fixed=0.23, token=1e-6, before=0.0, pair=0.0)
@example(fixed=0.0, token=0.03125, before=8.5e-6, pair=0.0)
@example(fixed=0.28, token=0.042, before=0.0, pair=0.0)
@pytest.mark.thorough
def test_alone_any_device_computes_at_nine_tenths_of_its_speed(fixed, token, before, pair):
    cost = device(fixed, token, before, pair)
    pacer = known(cost)
    assert bare(cost, 30_000) / taken(time_limits(cost, 30_000, pacer)) > 0.9


# ---------------------------------------------------------------------------------- beside running replies


@given(fixed=st.floats(0, 0.04), token=st.floats(1e-6, 5e-3), before=st.floats(0, 5e-7))
@pytest.mark.long
def test_no_chunk_lasts_longer_than_a_reply_may_stall(fixed, token, before):
    cost = device(fixed, token, before)
    chunks = time_limits(cost, 20_000, known(cost), stalls=True)
    assert max(seconds for _, seconds in chunks) <= 1.3 * STALL_S


@pytest.mark.parametrize("name", LAPTOPS)
def test_beside_replies_a_prompt_goes_on_at_most_of_its_speed(name):
    """As far as its own part of the time goes: what replies get comes on top."""
    cost = LAPTOPS[name]
    chunks = time_limits(cost, 20_000, known(cost), stalls=True)
    assert bare(cost, 20_000) / taken(chunks) > 0.64


def test_beside_steps_longer_than_a_stall_a_prompt_still_gets_its_share():
    """Each chunk is followed by a whole step, so shorter ones would leave it less."""
    pacer = known(LAPTOPS["dense, slow"])
    usual = pacer.length(0, stalls=True)
    assert pacer.length(0, stalls=True, share_s=0.1) == usual
    assert pacer.length(0, stalls=True, share_s=4 * STALL_S) >= 3 * usual
    a_second = pacer.length(0, stalls=True, share_s=1.0)
    assert pacer.length(0, stalls=True, share_s=60.0) == a_second, "one step that hung is no measure"


def test_chunks_use_the_time_they_have():
    cost = device(0.005, 5e-4, 2.5e-8)
    seconds = [seconds for _, seconds in time_limits(cost, 20_000, known(cost), stalls=True)]
    assert min(seconds[:-1]) > 0.5 * STALL_S


def test_chunks_shrink_as_the_context_makes_tokens_dearer():
    cost = device(0.005, 5e-4, 0, 1e-7)
    lengths = [tokens for tokens, _ in time_limits(cost, 40_000, known(cost), stalls=True)]
    assert lengths[-2] <= max(lengths) / 3


def test_a_very_slow_network_gets_very_short_chunks():
    """On a CPU without fast matrix products."""
    cost = device(0, 0.1)
    pacer = known(cost)
    assert pacer.length(8_000, stalls=True) == 4
    assert pacer.length(8_000, stalls=False) <= 32


# --------------------------------------------------------------------------------------------- what it learns


def test_a_thousand_short_chunks_do_not_make_it_forget_what_long_ones_cost():
    cost = LAPTOPS["many experts"]
    pacer = known(cost)
    time_limits(cost, 200_000, pacer, stalls=True)
    assert pacer.length(8_000, stalls=False) == LONGEST_CHUNK
    assert pacer.speed == pytest.approx(2048 / cost(2048, 200_000), rel=0.1)


def test_short_chunks_that_are_cheaper_than_they_should_be_do_not_make_long_ones_cheap():
    """A few tokens reach a few experts."""
    times = ChunkTimes()
    times.record(Chunk(2048, 0, 1.5))
    for _ in range(150):
        times.record(Chunk(128, 0, 0.2))
        times.record(Chunk(192, 0, 0.29))
    assert times.seconds(2048, 0) == pytest.approx(1.5, rel=0.3)


def test_chunks_shrink_while_the_machine_is_busy_and_grow_again_afterwards():
    calm = device(0.01, 4e-4, 1e-8)
    pacer = known(calm)
    usual = pacer.length(8_000, stalls=True)
    time_limits(lambda tokens, done: 10 * calm(tokens, done), 1_000, pacer, stalls=True)
    assert pacer.length(8_000, stalls=True) == ChunkTimes.TELLING * LONGEST_CHUNK < usual / 3
    time_limits(calm, 8_000, pacer, stalls=True)
    assert pacer.length(8_000, stalls=True) >= usual / 1.5


def test_one_hiccup_changes_nothing():
    calm = device(0.01, 4e-4, 1e-8)
    pacer = known(calm)
    time_limits(calm, 4_000, pacer, stalls=True)
    usual = pacer.length(4_000, stalls=True)
    pacer.record(Chunk(usual, 4_000, 10.0))
    assert pacer.length(4_000, stalls=True) >= usual / 1.5


def test_a_few_tokens_say_nothing_of_many():
    """A mixture of experts reads few of them for a token, and hardly waits."""
    cost = LAPTOPS["many experts"]
    pacer = known(cost)
    usual = pacer.length(0, stalls=True)
    for _ in range(50):
        pacer.record(Chunk(3, 0, 0.02))
    assert pacer.length(0, stalls=True) == usual


@given(st.lists(st.tuples(st.integers(0, 2048), st.integers(0, 10**6), st.floats(0, 100)), max_size=30))
def test_a_chunk_always_has_tokens_and_never_too_many(measured):
    pacer = ChunkPacer()
    for tokens, before, seconds in measured:
        pacer.record(Chunk(tokens, before, seconds))
        for stalls in (False, True):
            assert 4 <= pacer.length(before, stalls=stalls) <= LONGEST_CHUNK
        assert pacer.speed > 0


def test_lengths_are_few_and_fill_tiles():
    pacer = known(device(0.02, 1e-3))
    lengths = {
        pacer.length(before, stalls=stalls) for before in range(0, 100_000, 997) for stalls in (False, True)
    }
    assert lengths <= {2**power * part for power in range(2, 12) for part in (1, 1.25, 1.5, 1.75)}
    assert not [length for length in lengths if length % 32]


# ------------------------------------------------------------------------------------------------ the share


def test_replies_get_their_share_of_the_time():
    share = TimeShare(0.25)
    spent = {"prefill": 0.0, "decode": 0.0}
    for _ in range(2_000):
        if share.may_prefill:
            share.note_prefill(0.2)
            spent["prefill"] += 0.2
        share.note_decode(0.03)
        spent["decode"] += 0.03
    assert spent["decode"] / (spent["decode"] + spent["prefill"]) == pytest.approx(0.25, abs=0.01)


def test_time_that_nobody_waited_for_is_owed_to_nobody():
    share = TimeShare()
    share.note_decode(100.0)
    assert share.may_prefill
    share.note_prefill(0.2)
    assert not share.may_prefill, "what was decoded before is no credit"
    share.reset_owed()
    assert share.may_prefill


class Device:
    """A network and a clock: a pass takes what `cost` says, and a token of every sequence 10 ms."""

    def __init__(self, cost: Cost) -> None:
        self.now = 0.0
        self.done = 0
        self._cost = cost

    def __call__(self, shape: tuple[int, ...]) -> None:
        tokens = shape[1]
        if tokens > 1:
            self.now += self._cost(tokens, self.done)
            self.done += tokens
        else:
            self.now += 0.010


def simulated(resources, cost: Cost, **changes) -> tuple[Stepper, Device]:
    clock = Device(cost)
    network = Wrapped(resources.network, clock)
    return Stepper(resources, lambda: clock.now, 2048, network=network, **changes), clock


def test_the_loop_computes_a_prompt_in_long_chunks_while_no_reply_runs(resources):
    stepper, _ = simulated(resources, device(0.3, 1e-5))
    watched = stepper.submit(engine_request(range(1500), 1))
    stepper.finish(watched)
    ends = [0, *(done for done, _ in watched.progress)]
    assert [end - start for start, end in itertools.pairwise(ends)] == [256, 768, 475]


@pytest.mark.long
def test_a_running_reply_keeps_its_share_while_a_prompt_is_computed(resources):
    stepper, clock = simulated(resources, device(0.01, 4e-3))
    reply = stepper.submit(engine_request(range(3), 500))
    stepper.step_until(lambda: len(reply.tokens) > 3)
    began, count = clock.now, len(reply.tokens)
    prompt = stepper.submit(engine_request(range(1200), 1))
    stepper.step_until(lambda: prompt.look() and prompt.ending, 2_000)
    decoded = (len(reply.tokens) - count) * 0.010
    assert decoded / (clock.now - began) == pytest.approx(1 / 3, abs=0.07)
    stalls = [stall for stall in stepper.metrics.stalls if stall > 0.011]
    assert stalls
    assert max(stalls[2:]) < STALL_S + 0.02


@pytest.mark.long
def test_chunks_follow_the_speed_of_the_network_that_runs(resources):
    """By the real clock: at a millisecond a token, 192 tokens are what surely fits into 0.23 seconds."""
    slow = Wrapped(resources.network, lambda shape: time.sleep(shape[1] / 1000))
    stepper = Stepper(resources, clock=time.monotonic, longest_chunk=2048, network=slow)
    reply = stepper.submit(engine_request(range(3), 400))
    stepper.step_until(lambda: reply.tokens)
    watched = stepper.submit(engine_request(range(1200), 1))
    stepper.finish(watched)
    ends = [0, *(done for done, _ in watched.progress)]
    lengths = [end - start for start, end in itertools.pairwise(ends)]
    assert lengths[0] == 256
    assert 96 <= max(lengths[1:]) <= 192


def time_of(clock: Clock) -> EngineTime:
    resources = uncached_resources(Counting(has_state=False), lambda _: b"", frozenset(), 4, batches=True)
    return EngineTime(replace(resources, clock=PlanClock(clock)), EngineMetrics())


def test_decode_time_stays_owed_when_another_model_has_its_turn():
    clock = Clock()
    engine_time = time_of(clock)
    engine_time.begin_prefill(is_decoding=True)
    with engine_time.prefilling():
        clock.now += 0.6
    engine_time.end_turn()
    assert not engine_time.may_prefill(is_decoding=True)
    engine_time.rest()
    assert engine_time.may_prefill(is_decoding=True)


def test_steps_without_a_reply_do_not_make_decode_steps_look_short():
    clock = Clock()
    engine_time = time_of(clock)
    with engine_time.decoding():
        clock.now += 0.2
    engine_time.note_step(is_decoding=True)
    for _ in range(50):
        engine_time.note_step(is_decoding=False)
    assert engine_time._take_step_s() == pytest.approx(0.2)


def test_prompts_of_one_length_share_a_pass_although_measured_chunks_show_no_cost_of_a_pass():
    pacer = ChunkPacer()
    for tokens in (64, 128, 1024):
        pacer.record(Chunk(tokens, 0, tokens / 9000))
    assert pacer.saves_time([6] * 8, 0)
    assert pacer.saves_time([39, 36, 35, 38], 6)
    assert not pacer.saves_time([6, 39], 0)
