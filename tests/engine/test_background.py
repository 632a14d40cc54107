"""Background requests give way to all that somebody waits for, and become requests like any other in time."""

from __future__ import annotations

from typing import Any

import pytest

from start_llm.cache.disk.disk_reads import DiskWait
from start_llm.core.engine_request import EngineRequest
from start_llm.core.sequence_cost import SequenceCost
from start_llm.engine.admission import Admission
from start_llm.engine.engine_task import EngineTask
from start_llm.engine.generation import Generation
from start_llm.engine.schedule import BACKGROUND_PATIENCE_S, Schedule
from tests.cache.conversations import Cached
from tests.engine.harness import Wrapped, engine_request
from tests.engine.test_guards import VOCABULARY, Counting, check, counting
from tests.engine.test_prewarm import LONG
from tests.engine.test_shared_passes import Passes
from tests.engine.test_turns import PROMPTS, SPEED, Clock, drained, order_of
from tests.ties import Tally, greedy_reference

LONGER = LONG[::-1]
HOUR = 3600.0
MOST = 1.1
"""Passes up to the first token of a request beside background requests, in those that it needs alone."""
BOTH = pytest.mark.parametrize("has_state", [False, True])


def background(prompt: Any, max_tokens: int = 8, **more: Any) -> EngineRequest:
    return engine_request(prompt, max_tokens, is_background=True, **more)


def watched(*, has_state: bool = False, **changes: Any) -> tuple[Cached, Passes]:
    passes = Passes()
    network = Wrapped(Counting(has_state=has_state), passes.append)
    return counting(network=network, has_state=has_state, **changes), passes


def passes_to_first_token(stepper: Cached, passes: Passes) -> int:
    """Return how many passes of the network a request waits for."""
    before = len(passes)
    request = stepper.submit(engine_request(LONG, 3))
    stepper.step_until(lambda: request.tokens)
    needed = len(passes) - before
    stepper.finish(request)
    return needed


# ----------------------------------------------------------------------------------------------- the prompts


@pytest.mark.thorough
@pytest.mark.checked(2)
@BOTH
def test_a_request_waits_for_one_chunk_of_prompts_that_nobody_waits_for(has_state: bool):
    alone = passes_to_first_token(*watched(has_state=has_state, clock=Clock()))
    stepper, passes = watched(has_state=has_state, clock=Clock())
    others = [stepper.submit(background((n, *LONGER))) for n in range(3)]
    stepper.step_until(lambda: any(other.progress for other in others))
    assert passes_to_first_token(stepper, passes) <= MOST * alone
    assert not any(other.look() and other.ending for other in others)
    stepper.finish(*others)
    assert stepper.metrics.prefilled_tokens == len(LONG) - 1 + 3 * len(LONG), "nothing is computed twice"
    check(stepper)


@pytest.mark.thorough
@BOTH
def test_replies_that_nobody_waits_for_pause_while_a_prompt_is_read(has_state: bool):
    alone = passes_to_first_token(*watched(has_state=has_state, clock=Clock()))
    stepper, passes = watched(has_state=has_state, clock=Clock())
    others = [stepper.submit(background(prompt, 200)) for prompt in PROMPTS[:3]]
    stepper.step_until(lambda: all(other.tokens for other in others))
    assert passes_to_first_token(stepper, passes) <= MOST * alone
    stepper.finish(*others)
    for other, prompt in zip(others, PROMPTS, strict=False):
        assert other.tokens == [n % VOCABULARY for n in range(prompt[-1] + 1, prompt[-1] + 201)]


@pytest.mark.thorough
def test_a_reply_that_somebody_waits_for_does_not_pause():
    stepper, _ = watched(clock=Clock())
    reply = stepper.submit(engine_request(PROMPTS[0], 500))
    stepper.step_until(lambda: reply.tokens)
    had = len(reply.tokens)
    request = stepper.submit(engine_request(LONG, 3))
    stepper.step_until(lambda: request.tokens)
    assert len(reply.tokens) > had + 5
    stepper.finish(reply, request)


@pytest.mark.thorough
def test_a_pause_does_not_count_as_one_of_replies():
    """`/stats` shows how long replies pause between two tokens."""
    clock = Clock()
    stepper, _ = watched(clock=clock)
    other = stepper.submit(background(PROMPTS[0], 100))
    stepper.step_until(lambda: other.tokens)
    request = stepper.submit(engine_request(LONG, 3))
    while not request.tokens:
        clock.now += 1
        stepper.step()
    stepper.finish(request, other)
    assert stepper.metrics.worst_stall < 2


def test_its_prompt_is_read_beside_replies():
    stepper, _ = watched(clock=Clock())
    reply = stepper.submit(engine_request(PROMPTS[0], 1000))
    stepper.step_until(lambda: reply.tokens)
    other = stepper.submit(background(LONG))
    stepper.finish(other)
    assert reply.ending is None
    reply.generation.cancel()
    stepper.step()


def test_a_short_one_does_not_stop_a_long_prompt():
    stepper, _ = watched(clock=Clock())
    request = stepper.submit(engine_request(LONG, 3))
    stepper.step_until(lambda: request.progress)
    title = stepper.submit(background(PROMPTS[0]))
    stepper.step_until(lambda: request.tokens)
    assert not title.look()
    stepper.finish(request, title)


# ------------------------------------------------------------------------------------------ places and memory


@pytest.mark.parametrize("places", [1, 2])
@pytest.mark.sample(2)
def test_replies_that_nobody_waits_for_leave_their_places_at_once(places: int):
    stepper, passes = watched(clock=Clock(), max_sequences=places)
    others = [stepper.submit(background(prompt, 100)) for prompt in PROMPTS[:places]]
    stepper.step_until(lambda: all(other.tokens for other in others))
    passes_to_first_token(stepper, passes)
    assert not any(other.look() and other.ending for other in others)
    stepper.finish(*others)
    read = sum(len(prompt) - 1 for prompt in (LONG, *PROMPTS[:places]))
    assert stepper.metrics.prefilled_tokens == read
    assert [len(other.tokens) for other in others] == [100] * places


def test_one_that_waits_takes_no_place_of_a_reply():
    clock = Clock(0.01)
    stepper, _ = watched(clock=clock, max_sequences=1)
    reply = stepper.submit(engine_request(PROMPTS[0], 600))
    stepper.step_until(lambda: reply.tokens)
    other = stepper.submit(background(PROMPTS[1]))
    stepper.step_until(lambda: clock.now > 1000 + BACKGROUND_PATIENCE_S - 1 or reply.ending)
    assert (other.look(), stepper.metrics.preemptions) == ([], 0)
    stepper.finish(other)


@pytest.mark.long
def test_a_prompt_makes_way_where_memory_is_free_once_replies_have_made_way_too():
    """The one that reads and those that are written have the memory together."""
    cost = SequenceCost(token_bytes=2 * 32 * 4)
    room = cost.token_bytes * (2 * len(LONG) + 2000)
    stepper, passes = watched(clock=Clock(), admission=Admission(usable_bytes=room, cost=cost))
    reply = stepper.submit(background(PROMPTS[0], 900))
    stepper.step_until(lambda: reply.tokens)
    prompt = stepper.submit(background((1, *LONGER)))
    stepper.step_until(lambda: prompt.progress)
    passes_to_first_token(stepper, passes)
    assert not prompt.tokens
    stepper.finish(prompt, reply)


# --------------------------------------------------------------------------------------------- nobody starves


@pytest.mark.thorough
def test_it_ends_in_its_stated_time_however_many_others_come():
    """Each step takes a tenth of a second; requests come as soon as earlier ones are read."""
    clock = Clock()
    stepper, _ = watched(clock=clock)
    other = stepper.submit(background(PROMPTS[0]))
    came, number = clock.now, 0
    others = [stepper.submit(engine_request((n, *LONG), 1)) for n in range(2)]
    while not (other.look() and other.ending):
        stepper.step()
        clock.now += 0.1
        if any(request.ending for request in others if request.look()):
            number += 1
            others = [request for request in others if not request.ending]
            others.append(stepper.submit(engine_request((number, *LONG[::-1]), 1)))
    assert number > 5
    assert BACKGROUND_PATIENCE_S <= clock.now - came < BACKGROUND_PATIENCE_S + 5
    for request in others:
        request.generation.cancel()
    stepper.step(2)


def test_it_goes_behind_requests_that_came_later_and_by_itself_in_front_of_none():
    title, more = background(range(100)), background(range(50))
    assert order_of((0, title), (0.5, engine_request(LONG)), (0.6, more)) == [1, 0, 2]


def test_after_its_patience_it_is_a_request_like_any_other():
    clock = Clock()
    schedule = Schedule(clock)
    title, request = Generation(background(PROMPTS[0])), Generation(engine_request(PROMPTS[1]))
    schedule.add(title, SPEED)
    clock.now += BACKGROUND_PATIENCE_S
    schedule.add(request, SPEED)
    assert [entry.generation for entry in drained(schedule)] == [title, request]


def test_a_turn_is_not_due_behind_the_title_of_its_session():
    """opencode sends both under one name."""
    title, turn = background(range(1000), session="one"), engine_request(range(100), session="one")
    assert order_of((0, title), (0, turn), (0.5, engine_request(range(100), session="two"))) == [1, 2, 0]


@pytest.mark.thorough
def test_a_reply_beside_others_is_that_of_a_cold_server(resources):
    stepper = Cached(resources, clock=Clock())
    other = stepper.submit(background(LONG[:500], 20))
    stepper.step_until(lambda: other.tokens)
    request = stepper.submit(engine_request(LONG, 20))
    stepper.finish(other, request)
    Tally().compare(request.tokens, greedy_reference(resources.network, LONG, 20))
    Tally().compare(other.tokens, greedy_reference(resources.network, LONG[:500], 20))


def test_a_reply_goes_on_while_a_prompt_waits_for_the_disk():
    """There is nothing else to do: the loop would ask again and again whether the disk is ready."""
    stepper, _ = watched(clock=Clock())
    other = stepper.submit(background(PROMPTS[0], 200))
    stepper.step_until(lambda: other.tokens)
    asked = stepper.submit(engine_request(LONG, 5))
    stepper.loop._receive_all()
    first = stepper.loop.schedule.first
    assert first and first.generation is asked.generation
    first.wait, first.waits_until = DiskWait(), HOUR
    before = len(other.tokens)
    stepper.step(5)
    assert len(other.tokens) == before + 5
    first.wait.is_over = True
    stepper.step_until(lambda: asked.progress)
    read, before = len(asked.progress), len(other.tokens)
    stepper.step(5)
    assert (len(asked.progress), len(other.tokens)) == (read + 5, before), (
        "it pauses while the prompt is read"
    )


# ------------------------------------------------------------------------------------------------------ tasks


def patient_task(stepper: Cached, name: str, done: list[str]) -> None:
    stepper.inbox.put(EngineTask(name, lambda: done.append(name), patience_s=1.0))


@pytest.mark.thorough
def test_vectors_wait_while_a_prompt_is_read_and_no_longer_than_their_patience():
    clock, done = Clock(), list[str]()
    stepper, _ = watched(clock=clock)
    request = stepper.submit(engine_request(LONG, 200))
    stepper.step_until(lambda: request.progress)
    patient_task(stepper, "first", done)
    stepper.step(5)
    assert not done
    clock.now += 1
    stepper.step()
    assert done == ["first"]
    patient_task(stepper, "second", done)
    stepper.step_until(lambda: done[1:])
    assert request.tokens and not request.ending, "beside the reply"
    stepper.finish(request)


def test_a_loop_that_only_makes_vectors_makes_way_for_other_models():
    clock, done = Clock(), list[str]()
    stepper, _ = watched(clock=clock)
    for name in ("first", "second", "third"):
        patient_task(stepper, name, done)
    assert not stepper.loop.yields, "nobody has looked at them"
    stepper.step()
    assert (stepper.loop.yields, stepper.loop.rest_s, done) == (True, 0, [])
    clock.now += 1
    assert not stepper.loop.yields
    stepper.step(3)
    assert done == ["first", "second", "third"]
    assert stepper.loop.rest_s is None
