"""The loop serves fairly, drops what nobody wants, and survives what a network throws at it."""

from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from start_llm.core.events import Failed, Finished, Usage
from start_llm.core.sampling import Sampling
from start_llm.engine.batch import BatchGroup
from start_llm.engine.inbox import StopRequest
from start_llm.engine.loop import STOPPING
from tests.engine.harness import Breakdown, FailsOnce, Stepper, Watched, Wrapped, engine_request
from tests.mlx_memory import active_bytes
from tests.ties import Reference, Tally, greedy_reference

LONG = tuple(int(n) for n in np.random.default_rng(1).integers(0, 1500, 900))
SHORT = [tuple(range(n, n + 20)) for n in (10, 200, 400, 600, 800, 1000)]


@pytest.fixture(scope="module")
def references(resources) -> dict[tuple[int, ...], Reference]:
    return {prompt: greedy_reference(resources.network, prompt, 80) for prompt in (LONG, *SHORT)}


@pytest.fixture
def check(references):
    """Assert that these said what mlx_lm says, as far as they came."""

    def compare(*all_watched: Watched) -> None:
        for watched in all_watched:
            Tally().compare(watched.tokens, references[watched.generation.request.prompt.ids])

    return compare


def decoding(stepper: Stepper, count: int, max_tokens: int = 70) -> list[Watched]:
    """Requests that have said something already; one decodes alone, several in a batch."""
    sequences = [stepper.submit(engine_request(prompt, max_tokens)) for prompt in SHORT[:count]]
    stepper.step_until(lambda: all(sequence.tokens for sequence in sequences))
    return sequences


def prefilling(stepper: Stepper) -> Watched:
    """A long prompt of which a chunk is computed."""
    watched = stepper.submit(engine_request(LONG, 30))
    stepper.step_until(lambda: watched.progress)
    assert stepper.metrics.prefill
    return watched


# ---------------------------------------------------------------------------------------------------- serving


@pytest.mark.thorough
def test_a_reply_reports_progress_then_text_then_its_end(resources, check):
    stepper = Stepper(resources)
    watched = stepper.submit(engine_request(LONG, 20))
    stepper.finish(watched)
    assert watched.progress[-1] == (899, 900)
    assert watched.progress == sorted(watched.progress)
    assert watched.ending == Finished("length", Usage(prompt=900, cached=0, completion=20))
    check(watched)


def test_metrics_count_what_was_computed(resources):
    stepper = Stepper(resources)
    sequences = [stepper.submit(engine_request(prompt, 10)) for prompt in (LONG, *SHORT[:2])]
    stepper.finish(*sequences)
    stepper_metrics = stepper.metrics
    assert stepper_metrics.prefilled_tokens == 899 + 19 + 19
    assert stepper_metrics.generated_tokens == 30
    assert (stepper_metrics.active_sequences, stepper_metrics.waiting, stepper_metrics.prefill) == (
        0,
        0,
        None,
    )
    assert stepper_metrics.failures == 0


def test_no_more_sequences_decode_than_allowed_and_all_are_served_in_order(resources, check):
    stepper = Stepper(resources, max_sequences=2)
    sequences = [stepper.submit(engine_request(prompt, 12)) for prompt in SHORT]
    began: list[int] = []
    while not all(sequence.look() and sequence.ending for sequence in sequences):
        stepper.step()
        assert stepper.metrics.active_sequences <= 2
        began += [i for i, sequence in enumerate(sequences) if sequence.tokens and i not in began]
    assert began == [0, 1, 2, 3, 4, 5]
    check(*sequences)


def test_a_reply_goes_on_while_a_long_prompt_is_computed(resources, check):
    stepper = Stepper(resources)
    (sequence,) = decoding(stepper, 1)
    watched = stepper.submit(engine_request(LONG, 30))
    while not watched.tokens and not sequence.ending:
        before = len(sequence.tokens), len(watched.progress)
        stepper.step()
        assert len(watched.progress) <= before[1] + 1
        assert len(sequence.tokens) == before[0] + 1, "a token in every step, with a chunk or without"
    check(sequence, watched)


def test_short_prompts_share_one_chunk(resources):
    """One prompt a step would fill a batch slowly (lesson 5)."""
    stepper = Stepper(resources)
    sequences = [stepper.submit(engine_request(range(n, n + 10), 5)) for n in range(4)]
    stepper.step()
    assert all(sequence.progress == [(9, 10)] for sequence in sequences)
    assert stepper.metrics.active_sequences == 4


def test_a_burst_of_prompts_computes_no_more_than_one_chunk_a_step(resources):
    stepper = Stepper(resources, max_sequences=16)
    sequences = [stepper.submit(engine_request(range(n, n + 50), 3)) for n in range(12)]
    seen = 0
    while not all(sequence.look() and sequence.ending for sequence in sequences):
        stepper.step()
        computed, seen = stepper.metrics.prefilled_tokens - seen, stepper.metrics.prefilled_tokens
        assert computed <= 12 * 49


@pytest.mark.thorough
def test_staggered_requests_all_say_what_they_say_alone(resources, check):
    stepper = Stepper(resources)
    sequences = []
    for prompt, max_tokens in zip((*SHORT, LONG), (60, 5, 33, 60, 20, 41, 50), strict=True):
        sequences.append(stepper.submit(engine_request(prompt, max_tokens)))
        stepper.step(4)
    stepper.finish(*sequences)
    assert [len(sequence.tokens) for sequence in sequences] == [60, 5, 33, 60, 20, 41, 50]
    check(*sequences)


@pytest.mark.thorough
def test_sequences_take_turns_where_caches_cannot_be_merged(resources, check):
    stepper = Stepper(resources, batches=False)
    sequences = [stepper.submit(engine_request(prompt, 30)) for prompt in (*SHORT[:3], LONG)]
    stepper.finish(*sequences)
    check(*sequences)


def test_an_end_token_ends_the_reply(resources, references):
    end = references[SHORT[0]].ids[4]
    stepper = Stepper(resources, eos_token_ids=frozenset({end}))
    watched = stepper.submit(engine_request(SHORT[0], 40))
    stepper.finish(watched)
    assert watched.tokens[-1] == end
    assert isinstance(watched.ending, Finished)
    assert watched.ending.reason == "stop"


def test_log_probabilities_come_where_they_are_asked_for(resources):
    stepper = Stepper(resources)
    sequences = [stepper.submit(engine_request(SHORT[0], 6, top_logprobs=n)) for n in (None, 0, 3)]
    stepper.finish(*sequences)
    scored = [
        [item for event in sequence.seen for item in getattr(event, "logprobs", ())] for sequence in sequences
    ]
    assert [len(entries) for entries in scored] == [0, 6, 6]
    assert [item.chosen.token for item in scored[1]] == sequences[1].tokens
    assert all(item.top[0] == item.chosen and len(item.top) == 3 for item in scored[2])
    assert [item.chosen.logprob for item in scored[1]] == pytest.approx(
        [item.chosen.logprob for item in scored[2]], abs=1e-3
    )


# ----------------------------------------------------------------------------------------------- cancellation


def assert_only_this_one_left(stepper: Stepper, gone: Watched, others: list[Watched]) -> None:
    """One step frees it, it hears nothing more, and the others go on to their ends."""
    count = len(gone.look())
    gone.generation.cancel()
    stepper.step()
    assert (stepper.metrics.waiting, stepper.metrics.prefill) == (0, None)
    assert stepper.metrics.active_sequences == len(others)
    stepper.finish(*others)
    assert len(gone.look()) == count
    assert stepper.metrics.failures == 0


@pytest.mark.thorough
def test_a_request_that_gives_up_while_it_waits_is_dropped(resources, check):
    stepper = Stepper(resources, max_sequences=2)
    others = decoding(stepper, 2)
    waiting = stepper.submit(engine_request(LONG, 10))
    stepper.step()
    assert stepper.metrics.waiting == 1
    assert_only_this_one_left(stepper, waiting, others)
    assert waiting.seen == []
    check(*others)


@pytest.mark.thorough
@pytest.mark.parametrize("others", [1, 2], ids=["beside one row", "beside a batch"])
def test_a_request_that_gives_up_while_its_prompt_is_computed_is_dropped(resources, check, others):
    stepper = Stepper(resources)
    sequences = decoding(stepper, others)
    assert_only_this_one_left(stepper, prefilling(stepper), sequences)
    check(*sequences)


def test_a_request_that_gives_up_while_it_decodes_alone_is_dropped(resources, check):
    stepper = Stepper(resources)
    (sequence,) = decoding(stepper, 1)
    other = stepper.submit(engine_request(SHORT[1], 10))
    sequence.generation.cancel()
    stepper.step()
    assert stepper.metrics.active_sequences == 1
    stepper.finish(other)
    check(sequence, other)


@pytest.mark.thorough
@pytest.mark.checked(2)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_request_that_gives_up_in_a_batch_is_dropped(resources, check, place):
    stepper = Stepper(resources)
    sequences = decoding(stepper, 3)
    assert_only_this_one_left(stepper, sequences.pop(place), sequences)
    check(*sequences)


def test_all_may_give_up_at_once(resources, check):
    stepper = Stepper(resources)
    everyone = [*decoding(stepper, 3), prefilling(stepper)]
    for watched in everyone:
        watched.generation.cancel()
    stepper.step()
    assert (stepper.metrics.active_sequences, stepper.metrics.prefill) == (0, None)
    again = stepper.submit(engine_request(SHORT[3], 10))
    stepper.finish(again)
    check(again)


def test_a_request_that_gives_up_before_the_loop_sees_it_costs_nothing(resources):
    stepper = Stepper(resources)
    watched = stepper.submit(engine_request(LONG, 10))
    watched.generation.cancel()
    stepper.step()
    assert stepper.metrics.prefilled_tokens == 0
    assert watched.look() == []


def test_the_next_in_line_starts_in_the_step_that_drops_a_sequence(resources):
    stepper = Stepper(resources, max_sequences=1)
    (sequence,) = decoding(stepper, 1)
    heir = stepper.submit(engine_request(SHORT[1], 5))
    stepper.step()
    sequence.generation.cancel()
    stepper.step()
    assert heir.progress


@pytest.mark.thorough
def test_what_was_dropped_leaves_no_memory_after(resources):
    stepper = Stepper(resources)
    stepper.finish(*decoding(stepper, 3, max_tokens=5))
    before = active_bytes()
    held = [*decoding(stepper, 3), prefilling(stepper)]
    assert active_bytes() > before + 500_000
    for watched in held:
        watched.generation.cancel()
    stepper.step()
    assert active_bytes() < before + 10_000


# --------------------------------------------------------------------------------------------------- failures


def broken(resources, concerns: Any, nth: int = 1) -> Stepper:
    return Stepper(resources, network=Wrapped(resources.network, FailsOnce(concerns, nth)))


def assert_failed(stepper: Stepper, *failed: Watched) -> None:
    for watched in failed:
        assert watched.look()[-1] == Failed("The engine failed: Breakdown: broken on purpose")
    assert stepper.metrics.failures == 1


@pytest.mark.thorough
@pytest.mark.parametrize("nth", [1, 2, 4])
def test_a_failing_chunk_fails_its_prompt_alone(resources, check, nth):
    stepper = broken(resources, lambda shape: shape[1] > 19, nth)
    sequences = decoding(stepper, 2)
    watched = stepper.submit(engine_request(LONG, 10))
    waiting = stepper.submit(engine_request(SHORT[3], 10))
    stepper.finish(*sequences, watched, waiting)
    assert_failed(stepper, watched)
    assert len(watched.progress) == nth - 1
    check(*sequences, waiting)


@pytest.mark.thorough
def test_a_failing_cache_fails_the_request_that_was_to_start(resources, check):
    calls: list[int] = []

    class NoCacheAtFirst(Wrapped):
        def make_cache(self) -> Any:
            calls.append(1)
            if len(calls) == 2:
                FailsOnce(lambda _: True)(())
            from mlx_lm.models.cache import make_prompt_cache

            return make_prompt_cache(resources.network)

    stepper = Stepper(resources, network=NoCacheAtFirst(resources.network, lambda _: None))
    calls.clear()  # the loop has looked at a cache
    (sequence,) = decoding(stepper, 1)
    sequences = [stepper.submit(engine_request(prompt, 10)) for prompt in SHORT[1:3]]
    stepper.finish(sequence, *sequences)
    assert_failed(stepper, sequences[0])
    check(sequence, sequences[1])


@pytest.mark.sample(2)
@pytest.mark.parametrize("nth", [1, 2, 3, 10])
def test_a_failing_step_of_a_lone_sequence_fails_it(resources, check, nth):
    stepper = broken(resources, lambda shape: shape == (1, 1), nth)
    watched = stepper.submit(engine_request(SHORT[0], 30))
    stepper.finish(watched)
    assert_failed(stepper, watched)
    again = stepper.submit(engine_request(SHORT[0], 30))
    stepper.finish(again)
    check(watched, again)


@pytest.mark.thorough
@pytest.mark.parametrize("nth", [1, 2, 10])
def test_a_step_of_a_batch_that_fails_once_fails_nobody(resources, check, nth):
    stepper = broken(resources, lambda shape: shape[0] > 1 and shape[1] == 1, nth)
    sequences = [stepper.submit(engine_request(prompt, 30)) for prompt in SHORT[:2]]
    stepper.step()
    long, waiting = stepper.submit(engine_request(LONG, 10)), stepper.submit(engine_request(SHORT[3], 10))
    stepper.finish(*sequences, long, waiting)
    assert stepper.metrics.failures == 1
    assert [len(sequence.tokens) for sequence in (*sequences, long, waiting)] == [30, 30, 10, 10]
    check(*sequences, long, waiting)


class Hates:
    """Raises whenever a sequence feeds this token."""

    def __init__(self, network: Any, token: int) -> None:
        self._network, self._token = network, token

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        if self._token in cast("list[int]", tokens.flatten().tolist()):
            raise Breakdown("broken on purpose")
        return self._network(tokens, cache=cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


def test_the_sequence_that_breaks_its_batch_fails_and_the_others_go_on(resources, references, check):
    ids = [references[prompt].ids[:30] for prompt in SHORT[:3]]
    bad = next(token for token in ids[1][5:20] if token not in (*ids[0], *ids[2], *sum(SHORT[:3], ())))
    stepper = Stepper(resources, network=Hates(resources.network, bad))
    sequences = [stepper.submit(engine_request(prompt, 30)) for prompt in SHORT[:3]]
    stepper.finish(*sequences)
    assert isinstance(sequences[1].ending, Failed)
    assert len(sequences[1].tokens) == ids[1].index(bad), "all that it could say"
    assert stepper.metrics.failures == 2, "once for all, and once alone"
    assert [len(sequence.tokens) for sequence in (sequences[0], sequences[2])] == [30, 30]
    check(*sequences)


@pytest.mark.thorough
def test_a_failure_while_a_lone_sequence_and_a_newcomer_meet_fails_nobody(resources, check):
    stepper = broken(resources, lambda shape: shape[0] == 2)
    (sequence,) = decoding(stepper, 1)
    newcomer = stepper.submit(engine_request(SHORT[1], 20))
    stepper.finish(sequence, newcomer)
    assert [len(reply.tokens) for reply in (sequence, newcomer)] == [70, 20]
    check(sequence, newcomer)
    assert stepper.metrics.active_sequences == 0


def test_what_cannot_even_be_taken_out_takes_nobody_with_it_that_comes_later(resources, check, monkeypatch):
    """The device is gone for a moment: not even the caches of a sequence can be copied out of its batch."""
    stepper = Stepper(resources)
    sequences = decoding(stepper, 2)

    def breaks(*_: Any) -> None:
        raise Breakdown("broken on purpose")

    monkeypatch.setattr(BatchGroup, "remove", breaks)
    waiting = stepper.submit(engine_request(LONG, 5))
    sequences[0].generation.cancel()
    stepper.step()
    monkeypatch.undo()
    assert [isinstance(reply.look()[-1], Failed) for reply in (sequences[1], waiting)] == [True, True]
    later = stepper.submit(engine_request(SHORT[3], 10))
    stepper.finish(later)
    check(later)


@pytest.mark.parametrize("shares", [False, True])
def test_every_failure_is_counted(resources, shares):
    """Of a pass that prompts share too, after which each fails alone."""

    def always(_: Any) -> None:
        raise ValueError("no")

    broken = Wrapped(resources.network, always)
    stepper = Stepper(resources, network=broken, batches_prefill=shares)
    sequences = [stepper.submit(engine_request(prompt, 5)) for prompt in SHORT[:3]]
    stepper.finish(*sequences)
    assert all(sequence.ending == Failed("The engine failed: ValueError: no") for sequence in sequences)
    assert stepper.metrics.failures == 3 + shares


def test_a_text_that_cannot_be_decoded_fails_alone(resources, references, check):
    bad = references[SHORT[0]].ids[3]
    assert bad not in references[SHORT[1]].ids[:20]

    def token_bytes(token: int) -> bytes:
        if token == bad:
            raise KeyError(token)
        return resources.token_bytes(token)

    stepper = Stepper(resources, token_bytes=token_bytes)
    watched, beside = (
        stepper.submit(engine_request(SHORT[0], 20)),
        stepper.submit(engine_request(SHORT[1], 20)),
    )
    stepper.finish(watched, beside)
    assert isinstance(watched.ending, Failed)
    check(beside)
    later = stepper.submit(engine_request(SHORT[1], 20))
    stepper.finish(later)
    check(later)


def test_a_sampling_failure_does_not_silence_later_requests(resources):
    """Unlike in mlx_lm, where one exception in a filter is the end of sampling (lesson 1)."""
    odd = Sampling(temperature=1.0)
    object.__setattr__(odd, "top_k", 1.5)
    stepper = Stepper(resources)
    watched = stepper.submit(engine_request(SHORT[0], 10, odd))
    stepper.finish(watched)
    assert isinstance(watched.ending, Failed)
    good = stepper.submit(engine_request(SHORT[0], 10, Sampling(temperature=1.0)))
    stepper.finish(good)
    assert len(good.tokens) == 10


# --------------------------------------------------------------------------------------------------- stopping


def test_stopping_fails_what_is_left_at_every_stage(resources):
    stepper = Stepper(resources, max_sequences=3)
    everyone = [*decoding(stepper, 2), prefilling(stepper), stepper.submit(engine_request(SHORT[3], 5))]
    stepper.step()
    everyone.append(stepper.submit(engine_request(SHORT[4], 5)))
    stepper.inbox.put(StopRequest())
    late = stepper.submit(engine_request(SHORT[5], 5))
    stepper.step()
    assert stepper.loop.is_stopping
    stepper.loop.finish()
    for watched in [*everyone, late]:
        assert watched.look()[-1] == Failed(STOPPING)
