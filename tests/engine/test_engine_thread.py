"""The loops of several models take turns on one thread."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from start_llm.core.errors import EngineDied, ModelError
from start_llm.core.events import Failed, Finished
from start_llm.engine.engine import Engine
from start_llm.engine.engine_thread import EngineThread
from start_llm.engine.resources import EngineResources
from start_llm.telemetry.metrics import EngineMetrics
from tests.engine.harness import Breakdown, Watched, Wrapped, engine_request

PROMPT = tuple(range(30))


@pytest.fixture
def thread() -> Iterator[EngineThread]:
    made = EngineThread()
    made.start()
    yield made
    assert made.close(30)


def engine_on(thread: EngineThread, assemble: Callable[[], EngineResources]) -> Engine:
    engine = Engine(assemble, EngineMetrics(), max_waiting=10, thread=thread)
    engine.start()
    return engine


def named(resources: EngineResources, order: list[str], name: str) -> Callable[[], EngineResources]:
    """The same network, which writes its name at each forward pass."""
    return lambda: replace(resources, network=Wrapped(resources.network, lambda _: order.append(name)))


def reply(engine: Engine, length: int = 8) -> Watched:
    return Watched(engine.submit(engine_request(PROMPT, length)))


@pytest.mark.thorough
def test_models_say_together_what_each_says_alone(thread: EngineThread, resources: EngineResources):
    order: list[str] = []
    engines = [engine_on(thread, named(resources, order, name)) for name in "ab"]
    alone = reply(engines[0], 60)
    assert isinstance(alone.wait(), Finished)
    order.clear()
    together = [reply(engine, 60) for engine in engines]
    assert all(isinstance(watched.wait(), Finished) for watched in together)
    assert together[0].tokens == together[1].tokens == alone.tokens
    assert set(order) == {"a", "b"}
    assert all(engine.stop(10) for engine in engines)


@pytest.mark.thorough
def test_nobody_waits_for_the_end_of_a_long_reply_of_another_model(
    thread: EngineThread, resources: EngineResources, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("start_llm.engine.engine_thread._TURN_S", 0.01)
    first, second = (engine_on(thread, lambda: resources) for _ in range(2))
    long = reply(first, 400)
    while not long.look():
        pass
    assert isinstance(reply(second, 4).wait(), Finished)
    assert long.ending is None, "it goes on, and is not cut"
    assert isinstance(long.wait(60), Finished)
    assert len(long.tokens) == 400
    assert first.stop(10)
    assert second.stop(10)


@pytest.mark.thorough
def test_who_leaves_takes_nothing_from_the_others(thread: EngineThread, resources: EngineResources):
    first, second = (engine_on(thread, lambda: resources) for _ in range(2))
    running = reply(second, 300)
    assert first.stop(10)
    assert not first.is_alive()
    with pytest.raises(EngineDied):
        reply(first)
    assert isinstance(running.wait(), Finished)
    assert thread.is_alive()
    assert second.stop(10)


def test_a_loop_that_breaks_ends_alone(
    thread: EngineThread, resources: EngineResources, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    first, second = (engine_on(thread, lambda: resources) for _ in range(2))
    broken: Any = thread._entries[0].loop

    def step() -> None:
        raise Breakdown("out of order")

    monkeypatch.setattr(broken, "step", step)
    assert isinstance(reply(first).wait(), Failed)
    assert not first.is_alive()
    assert "out of order" in capsys.readouterr().err
    assert isinstance(reply(second).wait(), Finished)
    assert second.stop(10)


def test_a_model_that_cannot_be_loaded_harms_nobody(
    thread: EngineThread, resources: EngineResources, capsys: Any
):
    def fails() -> EngineResources:
        raise ModelError("There are no weights.")

    def breaks() -> EngineResources:
        raise Breakdown("no such layer")

    engine = engine_on(thread, lambda: resources)
    with pytest.raises(ModelError, match="no weights"):
        engine_on(thread, fails)
    with pytest.raises(ModelError, match="Loading failed: Breakdown: no such layer"):
        engine_on(thread, breaks)
    assert "no such layer" in capsys.readouterr().err
    assert isinstance(reply(engine).wait(), Finished)
    assert engine.stop(10)


@pytest.mark.thorough
def test_a_model_is_loaded_beside_a_reply(thread: EngineThread, resources: EngineResources):
    first = engine_on(thread, lambda: resources)
    running, done = reply(first, 400), threading.Event()
    second = engine_on(thread, lambda: (done.set(), resources)[1])
    assert done.is_set()
    assert isinstance(running.wait(), Finished)
    assert len(running.tokens) == 400
    assert first.stop(10)
    assert second.stop(10)


def test_a_closing_thread_takes_no_model(resources: EngineResources):
    thread = EngineThread()
    thread.start()
    assert thread.close(10)
    with pytest.raises(EngineDied):
        engine_on(thread, lambda: resources)


def test_a_closing_thread_runs_no_job_that_it_refuses(thread: EngineThread, resources: EngineResources):
    running = engine_on(thread, lambda: resources)
    assert not thread.close(0)
    ran: list[bool] = []
    assert not thread.submit(lambda: ran.append(True))
    done = reply(running, 40).wait()
    assert isinstance(done, Finished)
    assert running.stop(10)
    assert thread.close(10)
    assert ran == []


def test_a_job_that_was_taken_runs_although_the_thread_closes():
    thread, ran = EngineThread(), threading.Event()
    assert thread.submit(ran.set)
    assert thread.close(0)
    thread.start()
    assert ran.wait(10)
    assert thread.close(10)


# ------------------------------------------------------------------------------------- turns, without a model


class Working:
    """A loop that always has work, and notes its steps."""

    rest_s, is_stopping, yields = 0.0, False, False

    def __init__(self, name: str, steps: list[str]) -> None:
        self._name, self._steps = name, steps
        self.rests = 0

    def step(self) -> None:
        self._steps.append(self._name)

    def end_turn(self) -> None:
        self.rests += 1


def test_loops_that_have_work_take_turns_of_half_a_second():
    seconds, steps = itertools.count(step=0.2), list[str]()
    thread = EngineThread(clock=lambda: next(seconds))
    loops: list[Any] = [Working(name, steps) for name in "abc"]
    for loop in loops:
        thread.add(loop, on_end=lambda: None)
    for _ in range(18):
        thread._go_on()
    assert "".join(steps) == "aaabbbccc" * 2
    assert [loop.rests for loop in loops] == [2, 2, 1], "a loop that has to wait measures no pause"


def test_a_loop_that_only_prewarms_makes_way_for_those_that_somebody_waits_for():
    seconds, steps = itertools.count(step=0.2), list[str]()
    thread = EngineThread(clock=lambda: next(seconds))
    warming, awaited, other = loops = [Working(name, steps) for name in "wab"]
    warming.yields = True
    for loop in loops:
        thread.add(cast("Any", loop), on_end=lambda: None)
    for _ in range(9):
        thread._go_on()
    assert "".join(steps) == "aaabbbaaa"
    awaited.rest_s = other.rest_s = 100.0
    for _ in range(3):  # steps that were due before
        thread._go_on()
    assert steps[-1] == "w"


def test_a_loop_that_cannot_say_whether_it_has_work_ends_and_the_others_go_on(capsys):
    class Broken(Working):
        @property
        def rest_s(self) -> float:
            raise ValueError("what is startable")

        def fail_the_rest(self) -> None:
            steps.append("failed")

    steps = list[str]()
    thread = EngineThread(clock=lambda: 0.0)
    for loop in (Broken("a", steps), Working("b", steps)):
        thread.add(cast("Any", loop), on_end=lambda: steps.append("ended"))
    for _ in range(2):
        thread._go_on()
    assert steps == ["failed", "ended", "b", "b"]
    assert "what is startable" in capsys.readouterr().err


def test_a_loop_that_rests_is_asked_again_when_it_said():
    now, steps = [0.0], list[str]()
    thread = EngineThread(clock=lambda: now[0])
    loop: Any = Working("a", steps)
    loop.rest_s = 5.0
    thread.add(loop, on_end=lambda: None)
    thread.work_event.set()
    for now[0] in (1.0, 4.0, 7.0, 8.0, 14.0):
        thread.work_event.set()
        threading.Timer(0.01, thread.work_event.set).start()
        thread._go_on()
    assert steps == ["a", "a"], "after 6 s, and after 6 more"
