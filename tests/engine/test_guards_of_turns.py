"""What lets requests share one engine: `tests/mutants` takes these guards away."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
import pytest

from start_llm.core.events import Failed, Finished
from start_llm.engine.admission import Admission
from start_llm.engine.batch import Group
from start_llm.engine.cost import RowCost
from start_llm.engine.machinery import Machinery, Pace
from tests.cache.conversations import Cached
from tests.engine.harness import Breakdown, FailsOnce, Watched, job
from tests.engine.test_guards import PROMPTS, VOCABULARY, Counting, check
from tests.engine.test_guided import SCRIPT, Late, Reciter
from tests.engine.test_turns import Clock, ended_by_the_server


def counting(network: Any = None, **more: Any) -> Cached:
    clock = more.pop("clock", Clock())
    return Cached(
        Machinery(network or Counting(has_state=False), lambda _: b"a", frozenset(), 4, True, **more),
        clock=clock,
    )


def counted(prompt: tuple[int, ...], length: int) -> list[int]:
    return [token % VOCABULARY for token in range(prompt[-1] + 1, prompt[-1] + 1 + length)]


def test_a_prompt_beyond_its_deadline_ends():
    clock = Clock()
    engine = counting(clock=clock, pace=Pace(deadline_s=10))
    late = engine.submit(job(range(300), 5))
    engine.step_until(lambda: late.progress)
    clock.now += 11
    engine.step()
    ended_by_the_server(late, 0)
    check(engine)


def test_a_reply_beyond_its_deadline_ends():
    clock = Clock()
    engine = counting(clock=clock, pace=Pace(deadline_s=10))
    late = engine.submit(job(PROMPTS[0], 100))
    engine.step_until(lambda: late.tokens)
    clock.now += 11
    engine.step()
    ended_by_the_server(late, len(late.tokens))


class Hates(Counting):
    """Raises whenever a row feeds this token."""

    def __init__(self, token: int) -> None:
        super().__init__(has_state=False)
        self._token = token

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        if self._token in cast("list[int]", tokens.flatten().tolist()):
            raise Breakdown("broken on purpose")
        return super().__call__(tokens, cache)


def test_the_row_that_breaks_its_batch_fails_alone():
    """It is the last one to start again: the others are there for it to join."""
    bad = PROMPTS[2][-1] + 10
    engine = counting(Hates(bad))
    rows = [engine.submit(job(prompt, 30)) for prompt in PROMPTS]
    engine.finish(*rows)
    assert [isinstance(row.ending, Failed) for row in rows] == [False, False, True]
    assert engine.metrics.failures == 2, "once for all, and once alone"
    assert [row.tokens for row in rows[:2]] == [counted(one, 30) for one in PROMPTS[:2]]


@pytest.mark.parametrize("nth", [2, 3, 4])
def test_a_guide_that_is_ahead_of_its_row_fails_it(nth: int):
    engine = counting(Late(Counting(has_state=False), FailsOnce(lambda shape: shape == (3, 1), nth)))
    guided = engine.submit(job((5, 6, 7), 24, guide=Reciter(SCRIPT, VOCABULARY)))
    free = [engine.submit(job(prompt, 24)) for prompt in PROMPTS[:2]]
    engine.finish(guided, *free)
    assert engine.metrics.failures == 1
    assert isinstance(guided.ending, Failed)
    assert guided.tokens == list(SCRIPT[: len(guided.tokens)])
    assert [row.tokens for row in free] == [counted(prompt, 24) for prompt in PROMPTS[:2]]


COST = RowCost(token_bytes=10)


def test_rows_wait_for_memory():
    engine = counting(admission=Admission(10 * (75 + 40 + 200), COST), pace=Pace(turn_s=10**6))
    rows = [engine.submit(job(prompt, 100)) for prompt in PROMPTS]
    engine.step(5)
    assert (engine.metrics.active_rows, engine.metrics.waiting) == (2, 1)
    engine.finish(*rows)


def test_rows_that_outgrow_memory_go_on_one_after_the_other():
    engine = counting(admission=Admission(10 * (75 + 40 + 2 * 24), COST), pace=Pace(turn_s=10**6))
    rows = [engine.submit(job(prompt, 24)) for prompt in PROMPTS[:2]]
    engine.step_until(lambda: all(row.tokens for row in rows))
    for row in rows:
        object.__setattr__(row.generation.job, "max_tokens", 60)
    engine.finish(*rows)
    assert engine.metrics.interruptions >= 1
    assert [row.tokens for row in rows] == [counted(prompt, 60) for prompt in PROMPTS[:2]]


def test_what_the_machine_lacks_the_cache_gives_back():
    lacking = [0]
    engine = counting(shortage=lambda: lacking[0])
    for prompt in PROMPTS:
        engine.say(prompt, 5)
    kept = engine.cached.stored_bytes
    lacking[0] = kept // 2
    row = engine.submit(job((1, 2, 3), 100))
    engine.step(64)
    assert engine.cached.stored_bytes <= kept - kept // 2
    engine.finish(row)
    assert isinstance(row.ending, Finished)


def in_one_batch(engine: Cached) -> list[Watched]:
    rows = [engine.submit(job(prompt, 60)) for prompt in PROMPTS]
    engine.step_until(lambda: all(len(row.tokens) > 3 for row in rows))
    assert [len(group.rows) for group in engine.loop._decoder.groups] == [3]
    return rows


def breaks(*_: Any, **__: Any) -> None:
    raise Breakdown("broken on purpose")


def nothing_is_left_of(engine: Cached, rows: list[Watched]) -> None:
    """And who comes later is answered."""
    assert not [strand for strand in engine.cache._store.strands if strand.is_live]
    check(engine)
    later = [engine.say(prompt, 5) for prompt in PROMPTS]
    assert [one.tokens for one in later] == [counted(prompt, 5) for prompt in PROMPTS]
    assert not engine.loop._decoder.rows


@pytest.mark.parametrize("cancelled", [[0], [0, 1], [2, 1, 0]])
def test_of_rows_that_cannot_be_taken_out_nothing_is_kept(
    cancelled: list[int], monkeypatch: pytest.MonkeyPatch
):
    engine = counting()
    rows = in_one_batch(engine)
    monkeypatch.setattr(Group, "remove", breaks)
    for place in cancelled:
        rows[place].generation.cancel()
    engine.step()
    monkeypatch.undo()
    assert [sum(isinstance(event, Failed) for event in row.look()) for row in rows] == [1, 1, 1]
    nothing_is_left_of(engine, rows)


def test_a_row_that_was_taken_out_half_way_fails_and_nothing_of_it_is_kept(monkeypatch: pytest.MonkeyPatch):
    engine = counting()
    rows = in_one_batch(engine)
    monkeypatch.setattr("start_llm.engine.merging.settle", breaks)
    rows[1].generation.cancel()
    engine.step()
    monkeypatch.undo()
    engine.finish(*rows)
    assert isinstance(rows[1].ending, Failed)
    nothing_is_left_of(engine, rows)


@pytest.mark.timeout(10)  # who waits for ever fails soon
@pytest.mark.parametrize("is_cancelled", [False, True], ids=["stopped for another", "given up"])
def test_a_prompt_that_cannot_be_kept_when_it_is_left_fails(
    is_cancelled: bool, monkeypatch: pytest.MonkeyPatch
):
    engine = counting()
    long = engine.submit(job(range(390), 5))
    engine.step_until(lambda: engine.metrics.prefill)
    monkeypatch.setattr(engine.cache, "close", breaks)
    if is_cancelled:
        long.generation.cancel()
    short = engine.submit(job(PROMPTS[1][:20], 5))
    engine.step()
    monkeypatch.undo()
    engine.finish(long, short)
    assert isinstance(long.ending, Failed)
    assert short.tokens == counted(PROMPTS[1][:20], 5)
    nothing_is_left_of(engine, [long, short])
