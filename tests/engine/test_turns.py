"""Turns: short prompts go first, sequences take turns, nobody waits for ever, and nothing is computed
twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from scripts import tiny_models
from start_llm.core.engine_request import EngineRequest
from start_llm.core.events import Finished, Prefilling, Restored, Usage
from start_llm.core.limits import TimeLimits
from start_llm.core.sampling import Sampling
from start_llm.core.sequence_cost import SequenceCost
from start_llm.engine.admission import Admission
from start_llm.engine.generation import Generation
from start_llm.engine.resources import EngineResources
from start_llm.engine.schedule import Schedule
from start_llm.models.loader import load
from tests.cache.conversations import Cached
from tests.engine.harness import Stepper, Watched, engine_request, uncached_resources
from tests.engine.test_guards import Counting, check
from tests.ties import Reference, Tally, greedy_reference

SPEED = 100.0
COST = SequenceCost(token_bytes=10)
PROMPTS = [tuple(range(n, n + 30)) for n in range(0, 1200, 100)]
LONG = tuple(int(n) for n in np.random.default_rng(2).integers(0, 1500, 1500))


class Clock:
    """Stands still until a test moves it, or goes on by `step` whenever it is read."""

    def __init__(self, step: float = 0.0) -> None:
        self.now, self._step = 1000.0, step

    def __call__(self) -> float:
        self.now += self._step
        return self.now


# ----------------------------------------------------------------------------------------------- the schedule


def order_of(*arrivals: tuple[float, EngineRequest]) -> list[int]:
    """In which order those are served that arrived at these seconds, all before the first turn."""
    clock = Clock()
    start, schedule, names = clock.now, Schedule(clock), dict[Generation, int]()
    for name, (second, asked) in enumerate(arrivals):
        clock.now = start + second
        generation = Generation(asked)
        names[generation] = name
        schedule.add(generation, SPEED)
    return [names[turn.generation] for turn in drained(schedule)]


def drained(schedule: Schedule) -> Iterator[Any]:
    while first := schedule.first:
        schedule.take(first.generation.number)
        yield first


def of(tokens: int, **more: Any) -> EngineRequest:
    return engine_request(range(tokens), **more)


def test_equals_are_served_in_the_order_in_which_they_came():
    assert order_of(*[(0, of(100))] * 5) == [0, 1, 2, 3, 4]


def test_a_short_prompt_goes_before_a_long_one():
    assert order_of((0, of(1000)), (1, of(100))) == [1, 0]


def test_nobody_goes_before_one_that_has_waited_for_as_long_as_it_takes():
    assert order_of((0, of(1000)), *[(second, of(100)) for second in range(20)]) == [
        *range(1, 10), 0, *range(10, 21)
    ]  # fmt: skip


def test_what_was_computed_before_makes_a_prompt_short():
    assert order_of((0, of(1000)), (1, of(5000, repeated_tokens=4900))) == [1, 0]


def test_many_requests_of_one_session_do_not_hold_up_another():
    flood = [(0.0, of(100, session="one"))] * 10
    assert order_of(*flood, (0, of(100, session="two"))).index(10) <= 1


def test_sessions_of_two_tenants_are_two_though_they_have_one_name():
    flood = [(0.0, of(100, session="one", salt=b"1"))] * 10
    assert order_of(*flood, (0, of(100, session="one", salt=b"2"))).index(10) <= 1


def test_a_session_that_was_quiet_owes_nothing():
    first = [(0.0, of(1000, session="one"))] * 3
    assert order_of(*first, (60, of(100, session="one")), (60.5, of(100, session="two")))[-2:] == [3, 4]


@pytest.mark.parametrize("is_given_up", [True, False])
def test_a_session_owes_nothing_for_work_that_is_over(is_given_up: bool):
    """It was given up, or took less time than was expected."""
    schedule = Schedule(Clock())
    long, another, short = (
        Generation(of(tokens, session=name)) for tokens, name in ((6000, "one"), (1000, "two"), (100, "one"))
    )
    schedule.add(long, SPEED)
    if is_given_up:
        long.cancel()
        schedule.drop(long.number)
    else:
        next(drained(schedule))
    schedule.add(another, SPEED)
    schedule.add(short, SPEED)
    assert [turn.generation for turn in drained(schedule)][-2:] == [short, another]


def test_a_session_owes_what_is_being_computed_for_it():
    assert computed_beside(is_given_up=False) == ["another", "short"]


def test_a_session_does_not_owe_what_was_given_up_a_moment_ago():
    """The engine has not seen to it yet."""
    assert computed_beside(is_given_up=True) == ["short", "another"]


def computed_beside(*, is_given_up: bool) -> list[str]:
    """Return who is served first while a long prompt of one session is being computed."""
    schedule = Schedule(Clock())
    long, another, short = (
        Generation(of(tokens, session=name)) for tokens, name in ((6000, "one"), (1000, "two"), (100, "one"))
    )
    schedule.add(long, SPEED)
    begun = next(drained(schedule))
    schedule.add(another, SPEED, [begun])
    if is_given_up:
        long.cancel()
    schedule.add(short, SPEED, [begun])
    return ["short" if turn.generation is short else "another" for turn in drained(schedule)]


# ------------------------------------------------------------------------------------------------ the prompts


@pytest.fixture(scope="module")
def resources(tmp_path_factory: pytest.TempPathFactory) -> EngineResources:
    """As those of the other tests of the engine; mutants run tests of this module alone."""
    model = load(tiny_models.build("qwen3", tmp_path_factory.mktemp("model"), hidden=128, layers=2))
    tokenizer = model.tokenizer
    return uncached_resources(
        model.network, tokenizer.token_bytes, tokenizer.eos_token_ids, 4, batches=True, batches_prefill=True
    )


@pytest.fixture(scope="module")
def references(resources: EngineResources) -> dict[tuple[int, ...], Reference]:
    return {prompt: greedy_reference(resources.network, prompt, 60) for prompt in (LONG, *PROMPTS)}


def cached(resources: EngineResources, **changes: Any) -> Cached:
    return Cached(resources, **changes)


def a_long_prompt_half_computed(stepper: Stepper) -> Watched:
    long = stepper.submit(engine_request(LONG, 10))
    stepper.step_until(lambda: long.progress)
    return long


@pytest.mark.thorough
def test_a_short_prompt_does_not_wait_for_a_long_one_and_nothing_is_computed_twice(resources, references):
    stepper = cached(resources, clock=Clock())
    long = a_long_prompt_half_computed(stepper)
    short = stepper.submit(engine_request(PROMPTS[0], 10))
    stepper.step_until(lambda: short.tokens)
    assert long.progress[-1][0] < len(LONG) - 1
    stepper.finish(long, short)
    assert stepper.metrics.prefilled_tokens == len(LONG) + len(PROMPTS[0]) - 2
    assert long.progress == sorted(long.progress)
    assert long.progress[-1] == (len(LONG) - 1, len(LONG))
    assert [type(event) for event in long.seen if isinstance(event, Restored)] == [Restored]
    assert long.ending == Finished("length", Usage(prompt=len(LONG), cached=0, completion=10))
    for watched in (long, short):
        Tally().compare(watched.tokens, references[watched.generation.request.prompt.ids])


@pytest.mark.thorough
def test_counts_of_the_cache_do_not_know_of_the_interruption(resources):
    counts = []
    for asked in (None, PROMPTS[0]):
        stepper = cached(resources, clock=Clock())
        long = a_long_prompt_half_computed(stepper)
        others = [stepper.submit(engine_request(asked, 2))] if asked else []
        stepper.finish(long, *others)
        metrics = stepper.cached
        more = len(asked) if asked else 0
        counts.append(
            (
                metrics.lookups - len(others),
                metrics.computed_tokens - more,
                metrics.unavoidable_tokens - more,
                metrics.reused_tokens,
            )
        )
    assert counts[0] == counts[1] == (1, len(LONG), len(LONG), 0)


@pytest.mark.long
def test_what_two_prompts_begin_with_is_computed_once_whoever_goes_first(resources):
    for known in (0, 690):
        stepper = cached(resources, clock=Clock())
        long = a_long_prompt_half_computed(stepper)
        same = stepper.submit(engine_request((*LONG[:700], 7, 8), 2, repeated_tokens=known))
        stepper.finish(long, same)
        assert stepper.metrics.prefilled_tokens == len(LONG) - 1 + 1


@pytest.mark.long
def test_a_prompt_is_not_stopped_for_one_that_has_no_room(resources):
    """It goes on, and the one that would be due first waits for the reply that has the room."""
    admission = Admission(usable_bytes=10 * (2000 + len(LONG)), cost=COST)
    stepper = cached(
        resources, clock=Clock(), admission=admission, time_limits=TimeLimits(preempt_after_s=10**6)
    )
    first = stepper.submit(engine_request(PROMPTS[0], 1900))
    stepper.step_until(lambda: first.tokens)
    long = a_long_prompt_half_computed(stepper)
    large = stepper.submit(engine_request((5, *LONG, *LONG), 2, repeated_tokens=2 * len(LONG) - 10))
    stepper.step_until(lambda: len(long.tokens) == 10)
    assert not large.tokens
    first.generation.cancel()
    stepper.finish(large)


@pytest.mark.long
def test_a_prompt_that_was_known_and_is_kept_no_longer_is_a_long_one(resources):
    stepper = cached(resources, clock=Clock(step=0.01))
    stepper.finish(stepper.submit(engine_request(range(1000, 1200), 1)))  # so that its speed is known
    before = stepper.metrics.prefilled_tokens
    long = a_long_prompt_half_computed(stepper)
    lost = stepper.submit(engine_request((5, *LONG, *LONG), 2, repeated_tokens=2 * len(LONG)))
    short = stepper.submit(engine_request(PROMPTS[0], 2))
    stepper.step_until(lambda: long.tokens and short.tokens)
    assert not lost.tokens
    stepper.finish(long, lost, short)
    assert stepper.metrics.prefilled_tokens - before == 3 * len(LONG) + len(PROMPTS[0]) - 2


@pytest.mark.thorough
def test_a_prompt_that_is_due_is_not_stopped_any_more(resources):
    clock = Clock()
    stepper = cached(resources, clock=clock)
    long = a_long_prompt_half_computed(stepper)
    clock.now += 3600
    short = stepper.submit(engine_request(PROMPTS[0], 10))
    stepper.step_until(lambda: short.tokens)
    assert long.progress[-1] == (len(LONG) - 1, len(LONG))
    stepper.finish(long, short)


@pytest.mark.thorough
def test_without_a_cache_nothing_is_stopped(resources):
    stepper = Stepper(resources, clock=Clock())
    long = a_long_prompt_half_computed(stepper)
    short = stepper.submit(engine_request(PROMPTS[0], 2))
    stepper.finish(long, short)
    assert stepper.metrics.prefilled_tokens == len(LONG) + len(PROMPTS[0]) - 2


# ------------------------------------------------------------------------------------------------ the replies


def in_turns(stepper: Stepper, sequences: list[Watched]) -> list[list[int]]:
    """How many tokens each of them had, after each step."""
    had: list[list[int]] = []
    while not all(sequence.look() and sequence.ending for sequence in sequences):
        stepper.step()
        had.append([len(sequence.tokens) for sequence in sequences])
        assert len(had) < 3000
    return had


@pytest.mark.long
@pytest.mark.parametrize("max_sequences", [1, 2, 4])
def test_more_replies_than_places_take_turns_and_say_what_they_say_alone(
    resources, references, max_sequences
):
    stepper = cached(
        resources, clock=Clock(0.1), max_sequences=max_sequences, time_limits=TimeLimits(preempt_after_s=1)
    )
    sequences = [stepper.submit(engine_request(prompt, 60)) for prompt in PROMPTS]
    had = in_turns(stepper, sequences)
    assert max(next(counts for counts in had if min(counts) >= 1)) <= 20, (
        "nobody is far before all have begun"
    )
    assert all(max(counts) - min(counts) <= 20 for counts in had if max(counts) < 60)
    assert stepper.metrics.preemptions >= len(PROMPTS) - max_sequences
    assert stepper.metrics.prefilled_tokens == sum(len(prompt) - 1 for prompt in PROMPTS)
    for sequence, prompt in zip(sequences, PROMPTS, strict=True):
        assert sequence.ending == Finished("length", Usage(prompt=30, cached=0, completion=60))
        Tally().compare(sequence.tokens, references[prompt])


def test_nobody_is_interrupted_while_there_are_places(resources):
    stepper = cached(resources, clock=Clock(1), time_limits=TimeLimits(preempt_after_s=1))
    stepper.finish(*[stepper.submit(engine_request(prompt, 30)) for prompt in PROMPTS[:4]])
    assert stepper.metrics.preemptions == 0


@pytest.mark.thorough
def test_without_a_cache_nobody_is_interrupted(resources):
    stepper = Stepper(resources, clock=Clock(1), max_sequences=2, time_limits=TimeLimits(preempt_after_s=1))
    stepper.finish(*[stepper.submit(engine_request(prompt, 20)) for prompt in PROMPTS[:5]])
    assert stepper.metrics.preemptions == 0


@pytest.mark.thorough
def test_nobody_is_interrupted_who_could_not_be_kept(resources):
    admission = Admission(cost=SequenceCost(token_bytes=10**6))
    time_limits = TimeLimits(preempt_after_s=1)
    stepper = cached(
        resources,
        budget=8 * 10**7,
        clock=Clock(1),
        max_sequences=2,
        time_limits=time_limits,
        admission=admission,
    )
    stepper.finish(*[stepper.submit(engine_request(prompt, 30)) for prompt in PROMPTS[:5]])
    assert stepper.metrics.preemptions == 0


@pytest.mark.parametrize("max_sequences", [1, 3])
@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.sample(3)
def test_sequences_that_take_turns_are_kept_token_for_token(has_state, max_sequences):
    resources = uncached_resources(
        Counting(has_state=has_state),
        lambda token: b"a",
        frozenset(),
        max_sequences=max_sequences,
        batches=not has_state,
        time_limits=TimeLimits(preempt_after_s=1),
    )
    stepper = Cached(resources, clock=Clock(0.05))
    sequences = [stepper.submit(engine_request(range(n, n + 20), 80)) for n in (0, 70, 140, 210, 280)]
    while not all(sequence.look() and sequence.ending for sequence in sequences):
        stepper.step()
        check(stepper)
    assert stepper.metrics.preemptions > 5
    assert stepper.metrics.prefilled_tokens == 19 * 5
    for sequence in sequences:
        first = sequence.generation.request.prompt.ids[-1] + 1
        assert sequence.tokens == [token % 400 for token in range(first, first + 80)]


@pytest.mark.thorough
def test_a_reply_goes_on_until_a_long_prompt_has_waited_for_as_long_as_it_takes(resources):
    clock = Clock()
    stepper = cached(resources, clock=clock, max_sequences=1, time_limits=TimeLimits(preempt_after_s=0))
    first = stepper.submit(engine_request(PROMPTS[0], 1000))
    stepper.step_until(lambda: first.tokens)
    long = stepper.submit(engine_request(LONG, 5))
    stepper.step()
    assert stepper.loop.schedule.first
    due, had = stepper.loop.schedule.first.due, len(first.tokens)
    clock.now = (clock.now + due) / 2
    stepper.step(10)
    assert (stepper.metrics.preemptions, len(first.tokens)) == (0, had + 10)
    clock.now = due
    stepper.step_until(lambda: long.tokens)
    assert stepper.metrics.preemptions == 1
    first.generation.cancel()
    stepper.finish(long)


@pytest.mark.thorough
def test_replies_to_one_prompt_that_take_turns_do_not_cut_each_other_off(resources):
    """Each begins where the prompt ends, in the caches of another one, which goes on later."""
    stepper = cached(resources, clock=Clock(0.05), max_sequences=1, time_limits=TimeLimits(preempt_after_s=1))
    samplings = [Sampling(temperature=1.0, seed=seed) for seed in range(3)]
    sequences = [stepper.submit(engine_request(PROMPTS[0], 60, sampling)) for sampling in samplings]
    stepper.finish(*sequences)
    assert stepper.metrics.preemptions > 2
    assert stepper.metrics.prefilled_tokens == len(PROMPTS[0]) - 1


@pytest.mark.thorough
def test_a_state_from_which_a_preempted_reply_goes_on_is_not_cut_off():
    resources = uncached_resources(
        Counting(has_state=True),
        lambda token: b"a",
        frozenset(),
        max_sequences=1,
        batches=False,
        time_limits=TimeLimits(preempt_after_s=1),
    )
    stepper = Cached(resources, clock=Clock(0.05))
    sequences = [stepper.submit(engine_request(range(40), 60, boundaries=(39,))) for _ in range(3)]
    while not all(sequence.look() and sequence.ending for sequence in sequences):
        stepper.step()
        check(stepper)
    assert stepper.metrics.preemptions > 2
    assert stepper.metrics.prefilled_tokens == 39


@pytest.mark.thorough
def test_a_preempted_reply_that_was_given_up_leaves_its_caches_to_others(resources):
    stepper = cached(resources, clock=Clock(0.05), max_sequences=1, time_limits=TimeLimits(preempt_after_s=1))
    first, second = (stepper.submit(engine_request(prompt, 60)) for prompt in PROMPTS[:2])
    stepper.step_until(lambda: stepper.metrics.preemptions)
    first.generation.cancel()
    stepper.finish(second)
    again = stepper.submit(engine_request(PROMPTS[0], 60, Sampling(temperature=1.0, seed=7)))
    stepper.finish(again)
    assert stepper.cached.reused_in_place == 1


@pytest.mark.thorough
def test_a_seed_and_penalties_hold_through_interruptions(resources):
    sampling = Sampling(temperature=1.0, seed=7, repetition_penalty=1.3, frequency_penalty=0.5)
    outputs = []
    for preempt_after_s in (1, 10**6):
        stepper = cached(
            resources,
            clock=Clock(0.02),
            max_sequences=1,
            time_limits=TimeLimits(preempt_after_s=preempt_after_s),
        )
        sequences = [
            stepper.submit(engine_request(prompt, 40, sampling, top_logprobs=1)) for prompt in PROMPTS[:3]
        ]
        stepper.finish(*sequences)
        outputs.append([sequence.tokens for sequence in sequences])
        assert (stepper.metrics.preemptions > 2) == (preempt_after_s == 1)
        logprobs = [
            row for sequence in sequences for event in sequence.seen for row in getattr(event, "logprobs", ())
        ]
        assert [row.chosen.token for row in logprobs] == [
            token for sequence in sequences for token in sequence.tokens
        ]
    assert outputs[0] == outputs[1]


@pytest.mark.thorough
def test_an_interrupted_reply_can_be_given_up(resources):
    stepper = cached(resources, clock=Clock(0.05), max_sequences=1, time_limits=TimeLimits(preempt_after_s=1))
    sequences = [stepper.submit(engine_request(prompt, 60)) for prompt in PROMPTS[:3]]
    stepper.step_until(lambda: stepper.metrics.preemptions)
    sequences[0].generation.cancel()
    stepper.finish(*sequences[1:])
    assert [len(sequence.tokens) for sequence in sequences[1:]] == [60, 60]
    assert not stepper.is_busy


# -------------------------------------------------------------------------------------------------- deadlines


def ended_by_the_server(watched: Watched, completion: int) -> None:
    ending = watched.look()[-1]
    assert isinstance(ending, Finished)
    assert (ending.reason, ending.cut_by) == ("length", "deadline")
    assert ending.usage.completion == completion == len(watched.tokens)


@pytest.mark.thorough
def test_a_prompt_that_takes_too_long_ends_and_what_was_computed_of_it_stays(resources):
    clock = Clock()
    stepper = cached(resources, clock=clock, time_limits=TimeLimits(deadline_s=10))
    long = a_long_prompt_half_computed(stepper)
    clock.now += 9
    stepper.step()
    assert long.ending is None
    clock.now += 2
    stepper.step()
    ended_by_the_server(long, 0)
    computed = stepper.metrics.prefilled_tokens
    assert not stepper.is_busy
    again = stepper.submit(engine_request(LONG, 3))
    stepper.finish(again)
    assert stepper.metrics.prefilled_tokens == len(LONG) - 1
    assert again.ending == Finished("length", Usage(prompt=len(LONG), cached=computed, completion=3))


@pytest.mark.parametrize("count", [1, 3], ids=["alone", "in a batch"])
def test_a_reply_that_takes_too_long_ends_and_the_others_go_on(resources, references, count):
    clock = Clock()
    stepper = cached(resources, clock=clock, time_limits=TimeLimits(deadline_s=10))
    old = stepper.submit(engine_request(PROMPTS[0], 60))
    stepper.step_until(lambda: old.tokens)
    clock.now += 8
    sequences = [stepper.submit(engine_request(prompt, 20)) for prompt in PROMPTS[1:count]]
    stepper.step(6)
    clock.now += 3
    stepper.step()
    ended_by_the_server(old, len(old.tokens))
    assert old.tokens
    stepper.finish(*sequences)
    assert [len(sequence.tokens) for sequence in sequences] == [20] * len(sequences)
    Tally().compare(old.tokens, references[PROMPTS[0]])
    again = stepper.say((*PROMPTS[0], *old.tokens, 5), 1)
    assert isinstance(again.ending, Finished)
    assert again.ending.usage.cached >= len(PROMPTS[0]) + len(old.tokens) - 1


@pytest.mark.long
def test_time_in_which_it_is_not_its_turn_does_not_count(resources):
    clock = Clock(0.02)
    time_limits = TimeLimits(preempt_after_s=1, deadline_s=20)
    stepper = cached(resources, clock=clock, max_sequences=1, time_limits=time_limits)
    began = clock.now
    sequences = [stepper.submit(engine_request(prompt, 60)) for prompt in PROMPTS]
    stepper.finish(*sequences)
    assert clock.now - began > 20
    assert [len(sequence.tokens) for sequence in sequences] == [60] * len(PROMPTS)


def test_no_deadline_is_none(resources):
    clock = Clock(100)
    stepper = cached(resources, clock=clock)
    stepper.finish(sequence := stepper.submit(engine_request(PROMPTS[0], 20)))
    assert len(sequence.tokens) == 20


# ----------------------------------------------------------------------------------------------------- memory


def test_a_request_waits_until_there_is_memory_for_it(resources):
    """There is room for two prompts and the replies that they ask for."""
    admission = Admission(usable_bytes=10 * 2 * (30 + 500), cost=COST)
    stepper = cached(resources, admission=admission, time_limits=TimeLimits(preempt_after_s=10**6))
    sequences = [stepper.submit(engine_request(prompt, 500)) for prompt in PROMPTS[:3]]
    stepper.step(5)
    assert (stepper.metrics.active_sequences, stepper.metrics.waiting) == (2, 1)
    sequences[0].generation.cancel()
    stepper.step(3)
    assert (stepper.metrics.active_sequences, stepper.metrics.waiting) == (2, 0)
    for sequence in sequences:
        sequence.generation.cancel()


def test_a_sequence_alone_is_never_kept_waiting(resources):
    stepper = cached(resources, admission=Admission(usable_bytes=1, cost=COST))
    sequences = [stepper.submit(engine_request(prompt, 5)) for prompt in PROMPTS[:3]]
    stepper.finish(*sequences)
    assert [len(sequence.tokens) for sequence in sequences] == [5, 5, 5]


@pytest.mark.thorough
def test_sequences_that_outgrow_memory_go_on_one_after_the_other(resources, references):
    """Both were let in with their prompts and the 24 tokens that they might have been content with."""
    admission = Admission(usable_bytes=10 * (2 * (30 + 24)), cost=COST)
    stepper = cached(resources, admission=admission, time_limits=TimeLimits(preempt_after_s=10**6))
    sequences = [stepper.submit(engine_request(prompt, 24)) for prompt in PROMPTS[:2]]
    stepper.step_until(lambda: all(sequence.tokens for sequence in sequences))
    for sequence in sequences:
        object.__setattr__(sequence.generation.request, "max_tokens", 60)
    stepper.finish(*sequences)
    assert [len(sequence.tokens) for sequence in sequences] == [60, 60]
    assert stepper.metrics.preemptions >= 1
    for sequence, prompt in zip(sequences, PROMPTS, strict=False):
        Tally().compare(sequence.tokens, references[prompt])


# ----------------------------------------------------------------------------------------------------- stalls


def test_the_time_for_which_replies_stand_still_is_reported(resources):
    clock = Clock()
    stepper = cached(resources, clock=clock)
    sequence = stepper.submit(engine_request(PROMPTS[0], 30))
    stepper.step_until(lambda: len(sequence.tokens) >= 3)
    clock.now += 2
    stepper.step()
    assert stepper.metrics.worst_stall == 2
    assert stepper.metrics.stalls[-1] == 2
    stepper.finish(sequence)
    clock.now += 100
    stepper.finish(stepper.submit(engine_request(PROMPTS[1], 5)))
    assert stepper.metrics.worst_stall == 2, "nobody stood still while nobody was there"


@pytest.mark.thorough
def test_progress_is_reported_of_a_prompt_and_never_of_a_reply(resources):
    stepper = cached(resources, clock=Clock(0.05), max_sequences=1, time_limits=TimeLimits(preempt_after_s=1))
    sequences = [stepper.submit(engine_request(prompt, 40)) for prompt in PROMPTS[:3]]
    stepper.finish(*sequences)
    assert stepper.metrics.preemptions
    for sequence in sequences:
        kinds = [isinstance(event, Prefilling) for event in sequence.seen[1:]]
        assert kinds == sorted(kinds, reverse=True)
