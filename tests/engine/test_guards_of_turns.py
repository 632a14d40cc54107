"""Guards of requests that share one engine: `tests/mutants` takes these guards away."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx_lm.generate import generation_stream

from start_llm.cache.disk.disk_reads import DiskWait
from start_llm.cache.pages import SequenceCache
from start_llm.core.events import Failed, Finished, Restored
from start_llm.core.limits import TimeLimits
from start_llm.core.sequence_cost import SequenceCost
from start_llm.engine import merging
from start_llm.engine.admission import Admission
from start_llm.engine.batch import BatchGroup
from start_llm.engine.generation import Generation
from start_llm.engine.step_plan import PreemptRequest
from tests.cache.conversations import Cached
from tests.engine.harness import Breakdown, FailsOnce, Watched, engine_request, uncached_resources
from tests.engine.test_guards import PROMPTS, VOCABULARY, Counting, check
from tests.engine.test_guided import SCRIPT, Late, Reciter
from tests.engine.test_turns import Clock, ended_by_the_server


def counting(network: Any = None, **more: Any) -> Cached:
    clock, batches, most = (
        more.pop(*option) for option in (("clock", Clock()), ("batches", True), ("max_sequences", 4))
    )
    network = network or Counting(has_state=False)
    return Cached(
        uncached_resources(network, lambda _: b"a", frozenset(), most, batches, **more), clock=clock
    )


def counted(prompt: Sequence[int], length: int) -> list[int]:
    return [token % VOCABULARY for token in range(prompt[-1] + 1, prompt[-1] + 1 + length)]


def test_a_prompt_beyond_its_deadline_ends():
    clock = Clock()
    engine = counting(clock=clock, time_limits=TimeLimits(deadline_s=10))
    late = engine.submit(engine_request(range(300), 5))
    engine.step_until(lambda: late.progress)
    clock.now += 11
    engine.step()
    ended_by_the_server(late, 0)
    check(engine)


def test_a_reply_beyond_its_deadline_ends():
    clock = Clock()
    engine = counting(clock=clock, time_limits=TimeLimits(deadline_s=10))
    late = engine.submit(engine_request(PROMPTS[0], 100))
    engine.step_until(lambda: late.tokens)
    clock.now += 11
    engine.step()
    ended_by_the_server(late, len(late.tokens))


class Hates(Counting):
    """Raises whenever a sequence feeds this token."""

    def __init__(self, token: int) -> None:
        super().__init__(has_state=False)
        self._token = token

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        if self._token in cast("list[int]", tokens.flatten().tolist()):
            raise Breakdown("broken on purpose")
        return super().__call__(tokens, cache)


def test_the_sequence_that_breaks_its_batch_fails_alone():
    """It is the last one to start again: the others are there for it to join."""
    bad = PROMPTS[2][-1] + 10
    engine = counting(Hates(bad))
    sequences = [engine.submit(engine_request(prompt, 30)) for prompt in PROMPTS]
    engine.finish(*sequences)
    assert [isinstance(sequence.ending, Failed) for sequence in sequences] == [False, False, True]
    assert engine.metrics.failures == 2, "once for all, and once alone"
    assert [sequence.tokens for sequence in sequences[:2]] == [counted(ids, 30) for ids in PROMPTS[:2]]


@pytest.mark.parametrize("nth", [2, 3, 4])
def test_a_guide_that_is_ahead_of_its_sequence_fails_it(nth: int):
    engine = counting(Late(Counting(has_state=False), FailsOnce(lambda shape: shape == (3, 1), nth)))
    guided = engine.submit(engine_request((5, 6, 7), 24, guide=Reciter(SCRIPT, VOCABULARY)))
    free = [engine.submit(engine_request(prompt, 24)) for prompt in PROMPTS[:2]]
    engine.finish(guided, *free)
    assert engine.metrics.failures == 1
    assert isinstance(guided.ending, Failed)
    assert guided.tokens == list(SCRIPT[: len(guided.tokens)])
    assert [sequence.tokens for sequence in free] == [counted(prompt, 24) for prompt in PROMPTS[:2]]


COST = SequenceCost(token_bytes=10)


@pytest.mark.thorough
def test_sequences_wait_for_memory():
    engine = counting(
        admission=Admission(10 * (75 + 40 + 200), COST), time_limits=TimeLimits(preempt_after_s=10**6)
    )
    sequences = [engine.submit(engine_request(prompt, 100)) for prompt in PROMPTS]
    engine.step(5)
    assert (engine.metrics.active_sequences, engine.metrics.waiting) == (2, 1)
    engine.finish(*sequences)


def test_sequences_that_outgrow_memory_go_on_one_after_the_other():
    engine = counting(
        admission=Admission(10 * (75 + 40 + 2 * 24), COST), time_limits=TimeLimits(preempt_after_s=10**6)
    )
    sequences = [engine.submit(engine_request(prompt, 24)) for prompt in PROMPTS[:2]]
    engine.step_until(lambda: all(sequence.tokens for sequence in sequences))
    for sequence in sequences:
        object.__setattr__(sequence.generation.request, "max_tokens", 60)
    engine.finish(*sequences)
    assert engine.metrics.preemptions >= 1
    assert [sequence.tokens for sequence in sequences] == [counted(prompt, 60) for prompt in PROMPTS[:2]]


def test_what_the_machine_lacks_the_cache_gives_back():
    lacking = [0]
    engine = counting(shortage=lambda: lacking[0])
    for prompt in PROMPTS:
        engine.say(prompt, 5)
    kept = engine.cached.stored_bytes
    lacking[0] = kept // 2
    sequence = engine.submit(engine_request((1, 2, 3), 100))
    engine.step(64)
    assert engine.cached.stored_bytes <= kept - kept // 2
    engine.finish(sequence)
    assert isinstance(sequence.ending, Finished)


def in_one_batch(engine: Cached) -> list[Watched]:
    sequences = [engine.submit(engine_request(prompt, 60)) for prompt in PROMPTS]
    engine.step_until(lambda: all(len(sequence.tokens) > 3 for sequence in sequences))
    assert [len(group.sequences) for group in engine.loop.executor.running.decoder.groups] == [3]
    return sequences


def breaks(*_: Any, **__: Any) -> None:
    raise Breakdown("broken on purpose")


def nothing_is_left_of(engine: Cached, sequences: list[Watched]) -> None:
    """And who comes later is answered."""
    assert not [seq_cache for seq_cache in engine.cache._store.seq_caches if seq_cache.is_active]
    check(engine)
    later = [engine.say(prompt, 5) for prompt in PROMPTS]
    assert [reply.tokens for reply in later] == [counted(prompt, 5) for prompt in PROMPTS]
    assert not engine.loop.executor.running.decoder.sequences


@pytest.mark.sample(2)
@pytest.mark.parametrize("cancelled", [[0], [0, 1], [2, 1, 0]])
def test_of_sequences_that_cannot_be_taken_out_nothing_is_kept(
    cancelled: list[int], monkeypatch: pytest.MonkeyPatch
):
    engine = counting()
    sequences = in_one_batch(engine)
    monkeypatch.setattr(BatchGroup, "remove", breaks)
    for place in cancelled:
        sequences[place].generation.cancel()
    engine.step()
    monkeypatch.undo()
    assert [sum(isinstance(event, Failed) for event in sequence.look()) for sequence in sequences] == [
        1,
        1,
        1,
    ]
    nothing_is_left_of(engine, sequences)


def test_a_sequence_that_was_taken_out_half_way_fails_and_nothing_of_it_is_kept(
    monkeypatch: pytest.MonkeyPatch,
):
    engine = counting()
    sequences = in_one_batch(engine)
    monkeypatch.setattr("start_llm.engine.merging.materialize", breaks)
    sequences[1].generation.cancel()
    engine.step()
    monkeypatch.undo()
    engine.finish(*sequences)
    assert isinstance(sequences[1].ending, Failed)
    nothing_is_left_of(engine, sequences)


@pytest.mark.timeout(10)  # who waits for ever fails soon
@pytest.mark.parametrize("is_cancelled", [False, True], ids=["stopped for another", "given up"])
def test_a_prompt_that_cannot_be_kept_when_it_is_left_fails(
    is_cancelled: bool, monkeypatch: pytest.MonkeyPatch
):
    engine = counting()
    long = engine.submit(engine_request(range(390), 5))
    engine.step_until(lambda: engine.metrics.prefill)
    monkeypatch.setattr(engine.cache, "close", breaks)
    if is_cancelled:
        long.generation.cancel()
    short = engine.submit(engine_request(PROMPTS[1][:20], 5))
    engine.step()
    monkeypatch.undo()
    engine.finish(long, short)
    assert isinstance(long.ending, Failed)
    assert short.tokens == counted(PROMPTS[1][:20], 5)
    nothing_is_left_of(engine, [long, short])


class DiscardFails:
    """In place of `PromptCache.discard`: breaks the first `times` times, and is the real one after that."""

    def __init__(self, engine: Cached, times: int) -> None:
        self._real, self._left = engine.cache.discard, times

    def __call__(self, seq_cache: SequenceCache) -> None:
        self._left -= 1
        if self._left >= 0:
            raise Breakdown("broken on purpose")
        self._real(seq_cache)


@pytest.mark.parametrize("times", [1, 3, 4])
def test_who_cannot_even_be_given_up_is_reported_once(times: int, monkeypatch: pytest.MonkeyPatch):
    """Nobody waits for a request that the engine no longer has, running or in the queue."""
    engine = counting(time_limits=TimeLimits(preempt_after_s=10**6))
    sequences = in_one_batch(engine)
    prefilled = engine.submit(engine_request(range(400), 5))
    waiting = engine.submit(engine_request(range(500, 900), 5))
    monkeypatch.setattr(engine.cache, "discard", DiscardFails(engine, times))
    monkeypatch.setattr(BatchGroup, "step", breaks)
    with suppress(Breakdown):
        engine.step()
    monkeypatch.undo()
    if times == 4:
        engine.loop.fail_the_rest()
    requests = [*sequences, prefilled, waiting]
    assert [sum(isinstance(event, Failed) for event in request.look()) for request in requests] == [1] * 5
    left = [seq_cache for seq_cache in engine.cache._store.seq_caches if seq_cache.is_active]
    assert len(left) == times, "each of the others is discarded"
    assert not engine.loop.executor.running.decoder.sequences


def test_who_fails_while_its_step_is_waited_for_fails_alone_and_once(monkeypatch: pytest.MonkeyPatch):
    """Errors of a device surface where its results are waited for: before each chunk of another's prompt."""
    engine = counting(batches=False)
    bad, good = (engine.submit(engine_request(prompt, 40)) for prompt in PROMPTS[:2])
    engine.step_until(lambda: bad.tokens and good.tokens)
    real = BatchGroup.wait

    def wait(group: BatchGroup) -> None:
        if any(sequence.generation is bad.generation for sequence in group.sequences):
            raise Breakdown("broken on purpose")
        real(group)

    monkeypatch.setattr(BatchGroup, "wait", wait)
    long = engine.submit(engine_request(range(900), 5))
    engine.finish(bad, good, long)
    assert isinstance(bad.ending, Failed)
    assert engine.metrics.failures == 1
    assert [good.tokens, long.tokens] == [counted(PROMPTS[1], 40), counted(tuple(range(900)), 5)]
    assert sum(isinstance(event, Restored) for event in good.look()) == 1, "nothing of it was computed again"


def test_a_sequence_that_is_taken_out_by_half_leaves_the_others_their_own_caches(monkeypatch):
    """The caches of the batch were changed already when taking it out failed."""
    engine = counting()
    sequences = [engine.submit(engine_request(prompt, 30)) for prompt in PROMPTS]
    engine.step_until(lambda: all(len(sequence.tokens) > 2 for sequence in sequences))
    take_out = merging.take_out

    def half(*arguments: Any) -> Any:
        monkeypatch.setattr(merging, "take_out", take_out)
        take_out(*arguments)
        raise Breakdown("broken on purpose")

    monkeypatch.setattr(merging, "take_out", half)
    sequences[0].generation.cancel()
    engine.finish(*sequences[1:])
    assert [sequence.tokens for sequence in sequences[1:]] == [counted(ids, 30) for ids in PROMPTS[1:]]
    assert engine.metrics.failures == 1
    check(engine)


def restored(watched: Watched) -> int:
    return next(event.tokens for event in watched.look() if isinstance(event, Restored))


def leaving_together(engine: Cached, length: int) -> tuple[list[Watched], Watched]:
    """Two replies that end in one step, one step before this, and one that stays in their batch."""
    first, second, staying = (engine.submit(engine_request(prompt, 30)) for prompt in PROMPTS)
    engine.step_until(lambda: all(reply.tokens for reply in (first, second, staying)))
    for reply in (first, second):
        at = len(reply.tokens) - len(first.tokens)
        object.__setattr__(reply.generation.request, "max_tokens", length + at)
    engine.step_until(lambda: len(first.tokens) == length - 1)
    return [first, second], staying


def test_replies_that_end_in_one_step_leave_by_one_copy_of_their_batch(monkeypatch: pytest.MonkeyPatch):
    engine = counting()
    leaving, staying = leaving_together(engine, 12)
    places: list[list[int]] = []
    take_out = merging.take_out

    def noted(merged: list[Any], left: list[int], sequences: int) -> Any:
        places.append(list(left))
        return take_out(merged, left, sequences)

    monkeypatch.setattr(merging, "take_out", noted)
    engine.step()
    assert [isinstance(entry.ending, Finished) for entry in leaving if entry.look()] == [True, True]
    assert [sorted(entry) for entry in places] == [[0, 1, 2]], "the last one stays, with caches of its own"
    engine.finish(staying)
    assert staying.tokens == counted(PROMPTS[2], 30)
    for prompt, entry in zip(PROMPTS, leaving, strict=False):
        expected = counted(prompt, len(entry.tokens))
        assert entry.tokens == expected
        assert restored(engine.say((*prompt, *expected, 7), 1)) == len(prompt) + len(expected)
    check(engine)


def test_replies_that_end_together_leave_the_others_their_caches_where_that_fails(monkeypatch):
    engine = counting()
    leaving, staying = leaving_together(engine, 12)
    take_out = merging.take_out

    def half(*arguments: Any) -> Any:
        monkeypatch.setattr(merging, "take_out", take_out)
        take_out(*arguments)
        raise Breakdown("broken on purpose")

    monkeypatch.setattr(merging, "take_out", half)
    engine.finish(staying)
    assert staying.tokens == counted(PROMPTS[2], 30)
    assert [reply.tokens for reply in leaving] == [
        counted(prompt, len(reply.tokens)) for prompt, reply in zip(PROMPTS, leaving, strict=False)
    ]
    assert engine.metrics.failures == 1
    check(engine)


def test_a_reply_that_cannot_be_kept_leaves_those_that_end_with_it_their_caches(monkeypatch):
    engine = counting()
    leaving, staying = leaving_together(engine, 12)
    close = engine.cache.close

    def fails_once(*arguments: Any, **options: Any) -> None:
        monkeypatch.setattr(engine.cache, "close", close)
        raise Breakdown("broken on purpose")

    monkeypatch.setattr(engine.cache, "close", fails_once)
    engine.finish(staying)
    turns = [(*prompt, *reply.tokens) for prompt, reply in zip(PROMPTS, leaving, strict=False)]
    assert sorted(restored(engine.say((*turn, 7), 1)) == len(turn) for turn in turns) == [False, True]
    assert engine.metrics.failures == 1
    check(engine)


def test_a_reader_is_woken_once_a_step_and_after_all_tokens_of_the_step_are_accepted(
    monkeypatch: pytest.MonkeyPatch,
):
    engine = counting()
    leaving, staying = leaving_together(engine, 12)
    log: list[tuple[str, Any]] = []
    hold, send = Generation.hold, Generation.send
    monkeypatch.setattr(
        Generation, "hold", lambda own, events: (log.append(("held", own)), hold(own, events))
    )
    monkeypatch.setattr(Generation, "send", lambda own: (log.append(("sent", own)), send(own)))
    for reply in (*leaving, staying):
        reply.look()
    engine.step()
    readers = {reply.generation for reply in (*leaving, staying)}
    assert [what for what, _ in log] == ["held"] * 3 + ["sent"] * 3
    assert {reply for _, reply in log[:3]} == {reply for _, reply in log[3:]} == readers
    assert [reply._events.qsize() for reply in readers] == [1, 1, 1], "text and end of a reply come together"


def test_a_sequence_that_waits_after_its_batch_has_failed_occupies_no_row_of_it():
    engine = counting(Late(Counting(has_state=False), FailsOnce(lambda shape: shape == (3, 1), 3)))
    sequences = [engine.submit(engine_request(prompt, 20)) for prompt in PROMPTS]
    engine.step_until(lambda: engine.metrics.failures)
    assert [sequence.width for sequence in engine.loop.schedule.preempted] == [0, 0, 0]
    engine.finish(*sequences)


@pytest.mark.parametrize(("computed", "overtakes"), [(1, False), (1300, True)])
@pytest.mark.sample(2)
def test_a_prompt_that_was_stopped_overtakes_another_one_only_if_little_is_left_of_it(
    computed: int, overtakes: bool
):
    clock, prompt = Clock(), range(1500)
    engine = counting(clock=clock)
    stopped = engine.submit(engine_request(prompt, 2))
    engine.step_until(lambda: stopped.progress and stopped.progress[-1][0] >= computed)
    (running,) = engine.loop.executor.running.sequences
    with mx.stream(generation_stream):
        engine.loop.executor.execute(PreemptRequest(running.number, running.due), clock.now)
    clock.now += 3600
    waiting = engine.loop.schedule.first
    assert waiting
    waiting.wait, waiting.waits_until = DiskWait(), math.inf
    other = engine.submit(engine_request((5, *prompt), 2))
    engine.step_until(lambda: other.progress)
    waiting.wait.is_over = True
    engine.step_until(lambda: stopped.tokens or other.tokens)
    assert bool(stopped.tokens) == overtakes
    engine.finish(stopped, other)


def test_a_request_that_cannot_be_queued_fails_and_those_behind_it_go_on(monkeypatch, capsys):
    engine = counting()
    add, failed = engine.loop.schedule.add, list[object]()

    def refuse_first(*arguments: Any) -> None:
        if not failed:
            failed.append(arguments[0])
            raise Breakdown("broken on purpose")
        add(*arguments)

    monkeypatch.setattr(engine.loop.schedule, "add", refuse_first)
    first, second = (engine.submit(engine_request(prompt, 5)) for prompt in PROMPTS[:2])
    engine.finish(first, second)
    assert [type(request.ending) for request in (first, second)] == [Failed, Finished]
    assert "Breakdown: broken on purpose" in capsys.readouterr().err, "with its traceback"


def test_a_waiting_reply_that_cannot_be_cut_fails_alone(monkeypatch):
    clock = Clock()
    limits = TimeLimits(deadline_s=10, preempt_after_s=1)
    engine = counting(clock=clock, max_sequences=1, time_limits=limits)
    first, second = (engine.submit(engine_request(prompt, 40)) for prompt in PROMPTS[:2])
    engine.step_until(lambda: first.tokens or second.tokens)
    clock.now += 5
    engine.step_until(lambda: engine.loop.schedule.preempted)
    (waiting,) = engine.loop.schedule.preempted

    def refuse() -> None:
        raise Breakdown("broken on purpose")

    monkeypatch.setattr(waiting, "cut", refuse)
    waiting._run_time_s = 11
    engine.finish(first, second)
    assert {type(reply.ending) for reply in (first, second)} == {Failed, Finished}


def test_a_planner_that_always_fails_ends_replies_and_does_not_retry_them_for_ever(monkeypatch):
    engine = counting()
    sequences = [engine.submit(engine_request(prompt, 50)) for prompt in PROMPTS[:2]]
    engine.step_until(lambda: all(sequence.tokens for sequence in sequences))
    decode_parts = engine.loop._planner._decode_parts

    def broken() -> Any:
        if engine.loop.executor.running.decoder.groups:
            raise Breakdown("broken on purpose")
        return decode_parts()

    monkeypatch.setattr(engine.loop._planner, "_decode_parts", broken)
    engine.finish(*sequences, max_steps=40)
    assert [type(reply.ending) for reply in sequences] == [Failed, Failed]
