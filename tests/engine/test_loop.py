"""The loop serves fairly, drops what nobody wants, and survives what a network throws at it."""

import gc
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from start_llm.core.events import Failed, Finished, Usage
from start_llm.core.sampling import Sampling
from start_llm.engine.batch import Group
from start_llm.engine.loop import STOPPING
from tests.engine.harness import Breakdown, FailsOnce, Stepper, Watched, Wrapped, job
from tests.ties import Reference, Tally, greedy_reference

LONG = tuple(int(n) for n in np.random.default_rng(1).integers(0, 1500, 900))
SHORT = [tuple(range(n, n + 20)) for n in (10, 200, 400, 600, 800, 1000)]


@pytest.fixture(scope="module")
def references(machinery) -> dict[tuple[int, ...], Reference]:
    return {prompt: greedy_reference(machinery.network, prompt, 80) for prompt in (LONG, *SHORT)}


@pytest.fixture
def check(references):
    """Assert that these said what mlx_lm says, as far as they came."""

    def compare(*all_watched: Watched) -> None:
        for watched in all_watched:
            Tally().compare(watched.tokens, references[watched.generation.job.prompt.ids])

    return compare


def decoding(stepper: Stepper, count: int, max_tokens: int = 70) -> list[Watched]:
    """Requests that have said something already; one decodes alone, several in a batch."""
    rows = [stepper.submit(job(prompt, max_tokens)) for prompt in SHORT[:count]]
    stepper.step_until(lambda: all(row.tokens for row in rows))
    return rows


def prefilling(stepper: Stepper) -> Watched:
    """A long prompt of which a chunk is computed."""
    watched = stepper.submit(job(LONG, 30))
    stepper.step_until(lambda: watched.progress)
    assert stepper.metrics.prefill
    return watched


# ---------------------------------------------------------------------------------------------------- serving


def test_a_reply_reports_progress_then_text_then_its_end(machinery, check):
    stepper = Stepper(machinery)
    watched = stepper.submit(job(LONG, 20))
    stepper.finish(watched)
    assert watched.progress[-1] == (899, 900)
    assert watched.progress == sorted(watched.progress)
    assert watched.ending == Finished("length", Usage(prompt=900, cached=0, completion=20))
    check(watched)


def test_metrics_count_what_was_computed(machinery):
    stepper = Stepper(machinery)
    rows = [stepper.submit(job(prompt, 10)) for prompt in (LONG, *SHORT[:2])]
    stepper.finish(*rows)
    stepper_metrics = stepper.metrics
    assert stepper_metrics.prefilled_tokens == 899 + 19 + 19
    assert stepper_metrics.generated_tokens == 30
    assert (stepper_metrics.active_rows, stepper_metrics.waiting, stepper_metrics.prefill) == (0, 0, None)
    assert stepper_metrics.failures == 0


def test_no_more_rows_decode_than_allowed_and_all_are_served_in_order(machinery, check):
    stepper = Stepper(machinery, most_rows=2)
    rows = [stepper.submit(job(prompt, 12)) for prompt in SHORT]
    began: list[int] = []
    while not all(row.look() and row.ending for row in rows):
        stepper.step()
        assert stepper.metrics.active_rows <= 2
        began += [i for i, row in enumerate(rows) if row.tokens and i not in began]
    assert began == [0, 1, 2, 3, 4, 5]
    check(*rows)


def test_a_reply_goes_on_while_a_long_prompt_is_computed(machinery, check):
    stepper = Stepper(machinery)
    (row,) = decoding(stepper, 1)
    watched = stepper.submit(job(LONG, 30))
    while not watched.tokens and not row.ending:
        before = len(row.tokens), len(watched.progress)
        stepper.step()
        assert len(watched.progress) <= before[1] + 1
        assert len(row.tokens) == before[0] + 1, "a token in every step, with a chunk or without"
    check(row, watched)


def test_short_prompts_share_one_chunk(machinery):
    """One prompt a step would fill a batch slowly (lesson 5)."""
    stepper = Stepper(machinery)
    rows = [stepper.submit(job(range(n, n + 10), 5)) for n in range(4)]
    stepper.step()
    assert all(row.progress == [(9, 10)] for row in rows)
    assert stepper.metrics.active_rows == 4


def test_a_burst_of_prompts_computes_no_more_than_one_chunk_a_step(machinery):
    stepper = Stepper(machinery, most_rows=16)
    rows = [stepper.submit(job(range(n, n + 50), 3)) for n in range(12)]
    seen = 0
    while not all(row.look() and row.ending for row in rows):
        stepper.step()
        computed, seen = stepper.metrics.prefilled_tokens - seen, stepper.metrics.prefilled_tokens
        assert computed <= 12 * 49


def test_staggered_requests_all_say_what_they_say_alone(machinery, check):
    stepper = Stepper(machinery)
    rows = []
    for prompt, max_tokens in zip((*SHORT, LONG), (60, 5, 33, 60, 20, 41, 50), strict=True):
        rows.append(stepper.submit(job(prompt, max_tokens)))
        stepper.step(4)
    stepper.finish(*rows)
    assert [len(row.tokens) for row in rows] == [60, 5, 33, 60, 20, 41, 50]
    check(*rows)


def test_rows_take_turns_where_caches_cannot_be_merged(machinery, check):
    stepper = Stepper(machinery, batches=False)
    rows = [stepper.submit(job(prompt, 30)) for prompt in (*SHORT[:3], LONG)]
    stepper.finish(*rows)
    check(*rows)


def test_an_end_token_ends_the_reply(machinery, references):
    end = references[SHORT[0]].ids[4]
    stepper = Stepper(machinery, end_tokens=frozenset({end}))
    watched = stepper.submit(job(SHORT[0], 40))
    stepper.finish(watched)
    assert watched.tokens[-1] == end
    assert isinstance(watched.ending, Finished)
    assert watched.ending.reason == "stop"


def test_log_probabilities_come_where_they_are_asked_for(machinery):
    stepper = Stepper(machinery)
    rows = [stepper.submit(job(SHORT[0], 6, top_logprobs=n)) for n in (None, 0, 3)]
    stepper.finish(*rows)
    told = [[one for event in row.seen for one in getattr(event, "logprobs", ())] for row in rows]
    assert [len(entries) for entries in told] == [0, 6, 6]
    assert [one.chosen.token for one in told[1]] == rows[1].tokens
    assert all(one.top[0] == one.chosen and len(one.top) == 3 for one in told[2])
    assert [one.chosen.logprob for one in told[1]] == pytest.approx(
        [one.chosen.logprob for one in told[2]], abs=1e-3
    )


# ----------------------------------------------------------------------------------------------- cancellation


def assert_only_this_one_left(stepper: Stepper, gone: Watched, others: list[Watched]) -> None:
    """One step frees it, it hears nothing more, and the others go on to their ends."""
    said = len(gone.look())
    gone.generation.cancel()
    stepper.step()
    assert (stepper.metrics.waiting, stepper.metrics.prefill) == (0, None)
    assert stepper.metrics.active_rows == len(others)
    stepper.finish(*others)
    assert len(gone.look()) == said
    assert stepper.metrics.failures == 0


def test_a_request_that_gives_up_while_it_waits_is_dropped(machinery, check):
    stepper = Stepper(machinery, most_rows=2)
    others = decoding(stepper, 2)
    waiting = stepper.submit(job(LONG, 10))
    stepper.step()
    assert stepper.metrics.waiting == 1
    assert_only_this_one_left(stepper, waiting, others)
    assert waiting.seen == []
    check(*others)


@pytest.mark.parametrize("others", [1, 2], ids=["beside one row", "beside a batch"])
def test_a_request_that_gives_up_while_its_prompt_is_computed_is_dropped(machinery, check, others):
    stepper = Stepper(machinery)
    rows = decoding(stepper, others)
    assert_only_this_one_left(stepper, prefilling(stepper), rows)
    check(*rows)


def test_a_request_that_gives_up_while_it_decodes_alone_is_dropped(machinery, check):
    stepper = Stepper(machinery)
    (row,) = decoding(stepper, 1)
    other = stepper.submit(job(SHORT[1], 10))
    row.generation.cancel()
    stepper.step()
    assert stepper.metrics.active_rows == 1
    stepper.finish(other)
    check(row, other)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_request_that_gives_up_in_a_batch_is_dropped(machinery, check, place):
    stepper = Stepper(machinery)
    rows = decoding(stepper, 3)
    assert_only_this_one_left(stepper, rows.pop(place), rows)
    check(*rows)


def test_all_may_give_up_at_once(machinery, check):
    stepper = Stepper(machinery)
    everyone = [*decoding(stepper, 3), prefilling(stepper)]
    for watched in everyone:
        watched.generation.cancel()
    stepper.step()
    assert (stepper.metrics.active_rows, stepper.metrics.prefill) == (0, None)
    again = stepper.submit(job(SHORT[3], 10))
    stepper.finish(again)
    check(again)


def test_a_request_that_gives_up_before_the_loop_sees_it_costs_nothing(machinery):
    stepper = Stepper(machinery)
    watched = stepper.submit(job(LONG, 10))
    watched.generation.cancel()
    stepper.step()
    assert stepper.metrics.prefilled_tokens == 0
    assert watched.look() == []


def test_the_next_in_line_starts_in_the_step_that_drops_a_row(machinery):
    stepper = Stepper(machinery, most_rows=1)
    (row,) = decoding(stepper, 1)
    heir = stepper.submit(job(SHORT[1], 5))
    stepper.step()
    row.generation.cancel()
    stepper.step()
    assert heir.progress


def active_bytes() -> int:
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


def test_what_was_dropped_leaves_no_memory_behind(machinery):
    stepper = Stepper(machinery)
    stepper.finish(*decoding(stepper, 3, max_tokens=5))
    before = active_bytes()
    held = [*decoding(stepper, 3), prefilling(stepper)]
    assert active_bytes() > before + 500_000
    for watched in held:
        watched.generation.cancel()
    stepper.step()
    assert active_bytes() < before + 10_000


# --------------------------------------------------------------------------------------------------- failures


def broken(machinery, concerns: Any, nth: int = 1) -> Stepper:
    return Stepper(machinery, network=Wrapped(machinery.network, FailsOnce(concerns, nth)))


def assert_failed(stepper: Stepper, *failed: Watched) -> None:
    for watched in failed:
        assert watched.look()[-1] == Failed("The engine failed: Breakdown: broken on purpose")
    assert stepper.metrics.failures == 1


@pytest.mark.parametrize("nth", [1, 2, 4])
def test_a_failing_chunk_fails_its_prompt_alone(machinery, check, nth):
    stepper = broken(machinery, lambda shape: shape[1] > 19, nth)
    rows = decoding(stepper, 2)
    watched = stepper.submit(job(LONG, 10))
    waiting = stepper.submit(job(SHORT[3], 10))
    stepper.finish(*rows, watched, waiting)
    assert_failed(stepper, watched)
    assert len(watched.progress) == nth - 1
    check(*rows, waiting)


def test_a_failing_cache_fails_the_request_that_was_to_start(machinery, check):
    calls: list[int] = []

    class NoCacheAtFirst(Wrapped):
        def make_cache(self) -> Any:
            calls.append(1)
            if len(calls) == 2:
                FailsOnce(lambda _: True)(())
            from mlx_lm.models.cache import make_prompt_cache

            return make_prompt_cache(machinery.network)

    stepper = Stepper(machinery, network=NoCacheAtFirst(machinery.network, lambda _: None))
    calls.clear()  # the loop has looked at a cache
    (row,) = decoding(stepper, 1)
    rows = [stepper.submit(job(prompt, 10)) for prompt in SHORT[1:3]]
    stepper.finish(row, *rows)
    assert_failed(stepper, rows[0])
    check(row, rows[1])


@pytest.mark.parametrize("nth", [1, 2, 3, 10])
def test_a_failing_step_of_a_lone_row_fails_it(machinery, check, nth):
    stepper = broken(machinery, lambda shape: shape == (1, 1), nth)
    watched = stepper.submit(job(SHORT[0], 30))
    stepper.finish(watched)
    assert_failed(stepper, watched)
    again = stepper.submit(job(SHORT[0], 30))
    stepper.finish(again)
    check(watched, again)


@pytest.mark.parametrize("nth", [1, 2, 10])
def test_a_step_of_a_batch_that_fails_once_fails_nobody(machinery, check, nth):
    stepper = broken(machinery, lambda shape: shape[0] > 1 and shape[1] == 1, nth)
    rows = [stepper.submit(job(prompt, 30)) for prompt in SHORT[:2]]
    stepper.step()
    long, waiting = stepper.submit(job(LONG, 10)), stepper.submit(job(SHORT[3], 10))
    stepper.finish(*rows, long, waiting)
    assert stepper.metrics.failures == 1
    assert [len(row.tokens) for row in (*rows, long, waiting)] == [30, 30, 10, 10]
    check(*rows, long, waiting)


class Hates:
    """Raises whenever a row feeds this token."""

    def __init__(self, network: Any, token: int) -> None:
        self._network, self._token = network, token

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        if self._token in cast("list[int]", tokens.flatten().tolist()):
            raise Breakdown("broken on purpose")
        return self._network(tokens, cache=cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


def test_the_row_that_breaks_its_batch_fails_and_the_others_go_on(machinery, references, check):
    said = [references[prompt].ids[:30] for prompt in SHORT[:3]]
    bad = next(token for token in said[1][5:20] if token not in (*said[0], *said[2], *sum(SHORT[:3], ())))
    stepper = Stepper(machinery, network=Hates(machinery.network, bad))
    rows = [stepper.submit(job(prompt, 30)) for prompt in SHORT[:3]]
    stepper.finish(*rows)
    assert isinstance(rows[1].ending, Failed)
    assert len(rows[1].tokens) == said[1].index(bad), "all that it could say"
    assert stepper.metrics.failures == 2, "once for all, and once alone"
    assert [len(row.tokens) for row in (rows[0], rows[2])] == [30, 30]
    check(*rows)


def test_a_failure_while_a_lone_row_and_a_newcomer_meet_fails_nobody(machinery, check):
    stepper = broken(machinery, lambda shape: shape[0] == 2)
    (row,) = decoding(stepper, 1)
    newcomer = stepper.submit(job(SHORT[1], 20))
    stepper.finish(row, newcomer)
    assert [len(one.tokens) for one in (row, newcomer)] == [70, 20]
    check(row, newcomer)
    assert stepper.metrics.active_rows == 0


def test_what_cannot_even_be_taken_out_takes_nobody_with_it_that_comes_later(machinery, check, monkeypatch):
    """The device is gone for a moment: not even the caches of a row can be copied out of its batch."""
    stepper = Stepper(machinery)
    rows = decoding(stepper, 2)

    def breaks(*_: Any) -> None:
        raise Breakdown("broken on purpose")

    monkeypatch.setattr(Group, "remove", breaks)
    waiting = stepper.submit(job(LONG, 5))
    rows[0].generation.cancel()
    stepper.step()
    monkeypatch.undo()
    assert [isinstance(one.look()[-1], Failed) for one in (rows[1], waiting)] == [True, True]
    later = stepper.submit(job(SHORT[3], 10))
    stepper.finish(later)
    check(later)


def test_every_failure_is_counted(machinery):
    def always(_: Any) -> None:
        raise ValueError("no")

    stepper = Stepper(machinery, network=Wrapped(machinery.network, always))
    rows = [stepper.submit(job(prompt, 5)) for prompt in SHORT[:3]]
    stepper.finish(*rows)
    assert all(row.ending == Failed("The engine failed: ValueError: no") for row in rows)
    assert stepper.metrics.failures == 3


def test_a_text_that_cannot_be_decoded_fails_alone(machinery, references, check):
    bad = references[SHORT[0]].ids[3]
    assert bad not in references[SHORT[1]].ids[:20]

    def token_bytes(token: int) -> bytes:
        if token == bad:
            raise KeyError(token)
        return machinery.token_bytes(token)

    stepper = Stepper(machinery, token_bytes=token_bytes)
    watched, beside = stepper.submit(job(SHORT[0], 20)), stepper.submit(job(SHORT[1], 20))
    stepper.finish(watched, beside)
    assert isinstance(watched.ending, Failed)
    check(beside)
    later = stepper.submit(job(SHORT[1], 20))
    stepper.finish(later)
    check(later)


def test_a_sampling_failure_does_not_silence_later_requests(machinery):
    """Unlike in mlx_lm, where one exception in a filter is the end of sampling (lesson 1)."""
    odd = Sampling(temperature=1.0)
    object.__setattr__(odd, "top_k", 1.5)
    stepper = Stepper(machinery)
    watched = stepper.submit(job(SHORT[0], 10, odd))
    stepper.finish(watched)
    assert isinstance(watched.ending, Failed)
    good = stepper.submit(job(SHORT[0], 10, Sampling(temperature=1.0)))
    stepper.finish(good)
    assert len(good.tokens) == 10


# --------------------------------------------------------------------------------------------------- stopping


def test_stopping_fails_what_is_left_at_every_stage(machinery):
    stepper = Stepper(machinery, most_rows=3)
    everyone = [*decoding(stepper, 2), prefilling(stepper), stepper.submit(job(SHORT[3], 5))]
    stepper.step()
    everyone.append(stepper.submit(job(SHORT[4], 5)))
    stepper.inbox.put(None)
    late = stepper.submit(job(SHORT[5], 5))
    stepper.loop.run()
    for watched in [*everyone, late]:
        assert watched.look()[-1] == Failed(STOPPING)
