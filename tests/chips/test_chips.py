"""The simulated chips: that their time is the cost model's, and that a bad pacer fails on them."""

import pytest

from benchmarks.chips import cases
from start_llm.engine.pacing import ChunkPacer
from start_llm.engine.resources import TimeLimits
from tests.chips.chip_costs import CHIPS, MODELS, Cost
from tests.chips.chip_engine import (
    BARE,
    BARE_CHUNK,
    Pacing,
    SimulatedEngine,
    bare_prefill_s,
)
from tests.chips.chip_scenarios import alone, running, work


class Collapsed(ChunkPacer):
    """Chunks of four tokens, as the first pacer had them on a network with a latent cache."""

    def length(self, *_: object, **__: object) -> int:
        return 4


COLLAPSED = Pacing(TimeLimits(), Collapsed)


def cost(chip: str, model: str) -> Cost:
    return Cost(
        next(spec for spec in CHIPS if spec.name == chip), next(spec for spec in MODELS if spec.name == model)
    )


def test_a_bare_prompt_lasts_what_its_chunks_do_and_the_copies_of_what_is_cached():
    flash = cost("M3 Max", "Flash")
    chunks = [flash.forward_s(1, BARE_CHUNK, start) for start in (0, 2048, 4096)]
    copies = [flash.copy_s(start * flash.model.attention.token_bytes) for start in (2048, 4096, 6144)]
    last = flash.forward_s(1, 1, 6144)
    assert bare_prefill_s(flash, 3 * BARE_CHUNK + 1) == pytest.approx(sum([*chunks, *copies, last]))


@pytest.mark.thorough
def test_whole_chunks_with_nobody_else_there_are_as_fast_as_bare():
    outcome = alone(cost("M3 Max", "Flash"), 20_000, BARE)
    assert outcome is not None
    assert not outcome.failed


@pytest.mark.long
def test_a_collapsed_pacer_fails_alone():
    outcome = alone(cost("M3 Max", "Flash"), 2_000, COLLAPSED)
    assert outcome is not None
    assert any("of bare speed" in failure for failure in outcome.failed)


@pytest.mark.thorough
def test_whole_chunks_beside_replies_fail_for_their_stalls_and_for_the_share_of_the_replies():
    outcome = running(cost("M3 Max", "8B"), BARE)
    assert outcome is not None
    assert any("kept" in failure for failure in outcome.failed)
    assert any("stall" in failure for failure in outcome.failed)


@pytest.mark.thorough
def test_a_prompt_that_gets_no_time_beside_replies_fails():
    outcome = running(cost("M2", "8B"), Pacing(TimeLimits(decode_share=0.75)))
    assert outcome is not None
    assert any("prompt took" in failure for failure in outcome.failed)


@pytest.mark.long
def test_agents_share_their_system_text_and_wait_for_one_another():
    single, four = (work(cost("H100", "8B"), count, BARE) for count in (1, 4))
    assert max(single.ttft_s) < max(four.ttft_s) < 2 * max(single.ttft_s)
    assert single.unanswered == four.unanswered == 0
    assert single.tokens_s < four.tokens_s


def test_a_reply_has_its_token_when_the_step_is_done_and_the_next_step_runs_meanwhile():
    dense = cost("M3 Max", "8B")
    engine = SimulatedEngine(dense, max_sequences=1)
    stream = engine.submit(range(1000), 64)
    engine.run_until(lambda: stream.ending)
    steps = [dense.forward_s(1, 1, 1000), dense.forward_s(1, 1, 1063)]
    growth = dense.copy_s(1063 * dense.model.attention.token_bytes)
    assert all(steps[0] <= gap <= steps[1] + growth for gap in stream.gaps())


def test_what_a_chip_has_no_memory_for_is_left_out():
    assert all(case.play() is None for case in cases(["M1 ·", "32B"]))


def test_cases_are_chosen_by_words_in_their_names():
    chosen = [case.name for case in cases(["m3 max", "flash", "alone"])]
    assert chosen == [f"M3 Max · Flash · alone-{length}k" for length in (2, 20, 100)]
