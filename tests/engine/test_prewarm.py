"""Prewarms: a prompt is read when nobody waits for anything else, and nothing is generated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from start_llm.core.engine_request import EngineRequest
from start_llm.core.events import Failed, Finished, Restored, Text, Usage
from start_llm.engine.generation import Generation
from start_llm.engine.schedule import BACKGROUND_PATIENCE_S, Schedule
from tests.cache.conversations import Cached
from tests.engine.harness import CHUNK, Stepper, Watched, engine_request
from tests.engine.test_guards import Counting, check, counting
from tests.engine.test_shared_passes import Passes, prompts, sharing
from tests.engine.test_turns import PROMPTS, SPEED, Clock, drained
from tests.ties import Tally, greedy_reference

PROMPT = tuple(range(300))
LONG = tuple(int(n) for n in np.random.default_rng(2).integers(0, 400, 1500))


def prewarm(prompt: Any = PROMPT, **more: Any) -> EngineRequest:
    return engine_request(prompt, 0, **more)


def restored(watched: Watched) -> int:
    (report,) = [event for event in watched.look() if isinstance(event, Restored)]
    return report.tokens


@pytest.mark.parametrize("has_state", [False, True])
def test_the_prompt_is_read_and_nothing_is_generated(has_state: bool):
    stepper = counting(has_state=has_state, clock=Clock())
    warm = stepper.submit(prewarm())
    stepper.finish(warm)
    assert warm.ending == Finished("length", Usage(prompt=len(PROMPT), cached=0, completion=0))
    assert not any(isinstance(event, Text) for event in warm.seen)
    assert (stepper.metrics.generated_tokens, stepper.metrics.prefilled_tokens) == (0, len(PROMPT) - 1)
    assert not stepper.is_busy
    check(stepper)


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("boundaries", [(), (100, 290)], ids=["text", "chat"])
def test_the_next_request_with_this_prompt_computes_one_token(has_state: bool, boundaries: tuple[int, ...]):
    stepper = counting(has_state=has_state, clock=Clock())
    stepper.finish(stepper.submit(prewarm(boundaries=boundaries)))
    reply = stepper.say(PROMPT, 4, boundaries)
    assert restored(reply) == len(PROMPT) - 1
    assert reply.tokens == [300, 301, 302, 303]
    assert stepper.metrics.prefilled_tokens == len(PROMPT) - 1
    counts = stepper.cached
    assert counts.computed_tokens == counts.unavoidable_tokens == len(PROMPT), "each token is counted once"


@pytest.mark.parametrize("has_state", [False, True])
def test_a_prompt_that_goes_on_from_it_computes_what_is_new(has_state: bool):
    """A network with state goes on from the end of the last message."""
    stepper = counting(has_state=has_state, clock=Clock())
    stepper.finish(stepper.submit(prewarm(boundaries=(100, 290))))
    other = (*PROMPT[:290], 7, *range(50))
    assert restored(stepper.say(other, 2, (100, 290))) == 290


@pytest.mark.thorough
def test_a_reply_after_it_is_that_of_a_cold_server(resources):
    stepper = Cached(resources, clock=Clock())
    stepper.finish(stepper.submit(prewarm(LONG)))
    reply = stepper.say(LONG, 20)
    assert restored(reply) == len(LONG) - 1
    Tally().compare(reply.tokens, greedy_reference(resources.network, LONG, 20))


def test_a_prompt_that_is_known_already_ends_at_once():
    stepper = counting(clock=Clock())
    stepper.finish(stepper.submit(prewarm()))
    warm = stepper.submit(prewarm())
    stepper.finish(warm)
    assert warm.ending == Finished("length", Usage(prompt=len(PROMPT), cached=len(PROMPT) - 1, completion=0))
    assert stepper.metrics.prefilled_tokens == len(PROMPT) - 1


# --------------------------------------------------------------------------------------------- who goes first


def half_read(stepper: Stepper, **more: Any) -> Watched:
    warm = stepper.submit(prewarm(LONG, **more))
    stepper.step_until(lambda: warm.progress)
    return warm


def test_who_comes_while_it_is_read_waits_for_one_chunk_and_nothing_is_computed_twice():
    """Also with a prompt that is as long, which would not overtake another request."""
    stepper = counting(clock=Clock())
    warm = half_read(stepper)
    before = stepper.metrics.prefilled_tokens
    other = stepper.submit(engine_request(LONG[::-1], 5))
    stepper.step()
    assert other.progress, "its first chunk is computed in the next step"
    assert stepper.metrics.prefilled_tokens - before <= CHUNK
    stepper.step_until(lambda: other.tokens)
    assert warm.ending is None
    stepper.finish(warm, other)
    assert stepper.metrics.prefilled_tokens == 2 * len(LONG) - 2


def test_the_turn_that_it_prepares_takes_over_what_is_read():
    stepper = counting(clock=Clock())
    warm = half_read(stepper)
    turn = stepper.submit(engine_request(LONG, 5))
    stepper.step_until(lambda: turn.tokens)
    assert warm.ending is None, "it waits"
    stepper.finish(turn, warm)
    assert stepper.metrics.prefilled_tokens == len(LONG) - 1


def test_it_waits_while_a_reply_is_written():
    stepper = counting(clock=Clock())
    reply = stepper.submit(engine_request(PROMPTS[0], 30))
    stepper.step_until(lambda: reply.tokens)
    warm = stepper.submit(prewarm(PROMPTS[1]))
    stepper.finish(reply)
    assert not warm.look(), "not begun"
    stepper.finish(warm)
    assert isinstance(warm.ending, Finished)


def test_it_waits_no_longer_than_its_patience():
    """Replies that never end would else keep it from being read at all."""
    clock = Clock()
    stepper = counting(clock=clock)
    reply = stepper.submit(engine_request(PROMPTS[0], 1000))
    stepper.step_until(lambda: reply.tokens)
    warm = stepper.submit(prewarm(PROMPTS[1]))
    stepper.step(5)
    assert not warm.look()
    clock.now += BACKGROUND_PATIENCE_S
    stepper.finish(warm)
    assert reply.ending is None
    reply.generation.cancel()
    stepper.step(2)


def test_of_two_the_one_that_came_first_is_read_first_and_neither_overtakes_a_request():
    clock = Clock()
    schedule = Schedule(clock)
    first, second, request = (Generation(entry) for entry in (prewarm(), prewarm(), engine_request(LONG)))
    for generation in (first, second, request):
        schedule.add(generation, SPEED)
        clock.now += 0.1
    assert [entry.generation for entry in drained(schedule)] == [request, first, second]


def test_after_its_patience_it_is_a_request_like_any_other():
    clock = Clock()
    schedule = Schedule(clock)
    warm, request = Generation(prewarm()), Generation(engine_request(PROMPT))
    schedule.add(warm, SPEED)
    clock.now += BACKGROUND_PATIENCE_S
    schedule.add(request, SPEED)
    assert [entry.generation for entry in drained(schedule)] == [warm, request]


def test_one_that_is_read_is_not_overtaken_by_another():
    stepper = counting(clock=Clock())
    warm = half_read(stepper)
    another = stepper.submit(prewarm(LONG[::-1]))
    stepper.step_until(another.look)
    assert warm.look()
    assert warm.ending
    stepper.finish(another)


def test_one_whose_client_has_left_is_read_no_further_and_keeps_what_was_read():
    stepper = counting(clock=Clock())
    warm = half_read(stepper)
    warm.generation.cancel()
    stepper.step()
    read = stepper.metrics.prefilled_tokens
    assert not stepper.is_busy
    assert 0 < read < len(LONG) - 1
    assert restored(stepper.say(LONG, 2)) == read


def test_one_that_cannot_be_kept_fails_alone(monkeypatch):
    stepper = counting(clock=Clock())
    warm = stepper.submit(prewarm(PROMPTS[0]))

    def close(*_: Any, **__: Any) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(stepper.cache, "close", close)
        stepper.finish(warm)
    assert isinstance(warm.ending, Failed)
    assert len(stepper.say(PROMPTS[0], 3).tokens) == 3


def test_a_loop_that_only_prewarms_makes_way_for_other_models():
    clock = Clock()
    stepper = counting(clock=clock)
    assert not stepper.loop.yields, "it has nothing to do"
    warm = half_read(stepper)
    assert stepper.loop.yields
    clock.now += BACKGROUND_PATIENCE_S
    assert not stepper.loop.yields
    stepper.finish(warm)
    reply = stepper.submit(engine_request(PROMPTS[0], 3))
    stepper.step()
    assert not stepper.loop.yields
    stepper.finish(reply)


def test_a_burst_of_short_ones_is_read_in_one_pass_and_each_is_kept():
    passes = Passes()
    stepper = sharing(Counting(has_state=False), passes.append)
    asked = prompts(seed=1)
    warm = [stepper.submit(prewarm(prompt)) for prompt in asked]
    stepper.finish(*warm)
    assert passes.shared
    assert (stepper.metrics.generated_tokens, stepper.is_busy) == (0, False)
    for prompt in asked:
        assert restored(stepper.say(prompt, 2)) == len(prompt) - 1


def test_a_request_does_not_wait_for_a_burst_of_them():
    """All of those that share a pass are stopped, and go on together."""
    stepper = sharing(Counting(has_state=False), lambda _: None, pass_s=10.0)
    warm = [stepper.submit(prewarm(prompt)) for prompt in prompts(seed=2, lengths=(400,) * 6)]
    stepper.step_until(lambda: any(watched.look() for watched in warm))
    request = stepper.submit(engine_request(LONG, 3))
    stepper.step_until(lambda: request.tokens)
    stepper.finish(request, *warm)
    assert stepper.metrics.prefilled_tokens == 6 * 399 + len(LONG) - 1
