"""The events of a request reach its reader in order, at once or a few times a second."""

import pytest

from start_llm.core.events import Idle, Text
from start_llm.engine.generation import Generation
from start_llm.engine.resources import EngineResources
from tests.engine.harness import Stepper, Watched, engine_request


def text(number: int) -> Text:
    return Text(f"{number} ", (number,))


@pytest.fixture
def generation() -> Generation:
    return Generation(engine_request((1, 2, 3)))


def test_the_first_token_wakes_the_reader_at_once(generation):
    generation.hold([text(1)])
    generation.send_at_intervals(100.0)
    assert generation.take(0) == [text(1)]


def test_the_next_tokens_wake_it_a_few_times_a_second_with_all_that_has_come(generation):
    woken: list[list[Text]] = []
    for step in range(30):
        generation.hold([text(step)])
        generation.send_at_intervals(100.0 + 0.03 * step)
        ready = generation.take(0)
        if ready != [Idle()]:
            woken.append(ready)
    assert [len(ready) for ready in woken] == [1, *[3] * 9]
    assert [event for ready in woken for event in ready] == [text(step) for step in range(28)]


def test_what_is_held_goes_out_before_an_event_that_cannot_wait(generation):
    generation.send_at_intervals(100.0)
    generation.hold([text(1)])
    generation.send_at_intervals(100.01)
    generation.emit(text(2))
    assert generation.take(0) == [text(1), text(2)]


# ---------------------------------------------------------------------------------------------- many at once

CROWD = 12


class Time:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def crowd(resources: EngineResources, time: Time, count: int = CROWD) -> tuple[Stepper, list[Watched]]:
    """Replies that have their first tokens."""
    stepper = Stepper(resources, time, max_sequences=CROWD + 1)
    replies = [stepper.submit(engine_request((20 + place, 7, 9), 40)) for place in range(count)]
    stepper.step_until(lambda: all(reply.tokens for reply in replies))
    return stepper, replies


@pytest.mark.parametrize(("count", "woken"), [(8, 10), (CROWD, 3)])
def test_many_replies_wake_their_readers_a_few_times_a_second_and_few_for_each_token(
    resources, count: int, woken: int
):
    time = Time()
    stepper, replies = crowd(resources, time, count)
    time.now += 1.0
    stepper.step()
    for reply in replies:
        reply.look()
    wakings = 0
    for _ in range(10):
        time.now += 0.03
        stepper.step()
        wakings += replies[0].generation.take(0) != [Idle()]
    assert wakings == woken


@pytest.mark.long
def test_a_crowd_says_the_same_whatever_is_held(resources):
    time = Time()
    stepper, replies = crowd(resources, time)
    while any(reply.ending is None for reply in replies):
        time.now += 0.03
        stepper.step()
        for reply in replies:
            reply.look()
    for place, reply in enumerate(replies):
        alone_stepper = Stepper(resources)
        alone = alone_stepper.submit(engine_request((20 + place, 7, 9), 40))
        alone_stepper.finish(alone)
        assert reply.tokens == alone.tokens


def test_nothing_is_held_while_a_crowd_waits_for_a_prompt(resources):
    time = Time()
    stepper, replies = crowd(resources, time)
    stepper.step()
    before = [len(reply.tokens) for reply in replies]
    stepper.submit(engine_request(range(300), 4))
    stepper.step()
    assert all(len(reply.tokens) > count for reply, count in zip(replies, before, strict=True))
