"""What becomes of requests when something fails that is none of their own doing."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generation_stream

from start_llm.cache.disk.disk_reads import DiskWait
from start_llm.core.events import Failed, Finished
from start_llm.core.sequence_cost import SequenceCost
from start_llm.engine.admission import Admission
from start_llm.engine.batch import BatchGroup
from start_llm.engine.draft_gain import DraftGain
from start_llm.engine.draft_index import MATCHES
from start_llm.engine.engine_task import EngineTask
from start_llm.engine.executor import StepExecutor
from start_llm.engine.generation import Generation
from start_llm.engine.pass_times import PassTimes
from start_llm.engine.resources import TimeLimits
from start_llm.engine.sequence import EngineSequence
from start_llm.engine.step_plan import PreemptRequest
from tests.cache.conversations import Cached
from tests.engine.harness import Breakdown, Watched, engine_request
from tests.engine.test_background import background
from tests.engine.test_guards import PROMPTS, check
from tests.engine.test_guards_of_drafts import CHEAP, bold
from tests.engine.test_guards_of_turns import counted, counting
from tests.engine.test_idle_work import idle
from tests.engine.test_turns import Clock

ALL = tuple(range(128))


class OutOfRoom(Breakdown):
    """What a failing eviction raises."""


def fails_once(method: Callable[..., Any], when: Callable[[], object]) -> Callable[..., Any]:
    """Return a method that raises at its first call for which `when` holds."""
    left = [1]

    def failing(*arguments: Any, **options: Any) -> Any:
        if left[0] and when():
            left[0] = 0
            raise OutOfRoom("broken on purpose")
        return method(*arguments, **options)

    return failing


def decoding(engine: Cached, *lengths: int) -> list[Watched]:
    replies = [
        engine.submit(engine_request(prompt, length))
        for prompt, length in zip(PROMPTS, lengths, strict=False)
    ]
    engine.step_until(lambda: all(reply.tokens for reply in replies))
    return replies


def whole_replies(*lengths: int) -> list[list[int]]:
    return [counted(prompt, length) for prompt, length in zip(PROMPTS, lengths, strict=False)]


# ----------------------------------------------------------------------------------------------- evictions


@pytest.mark.parametrize("lengths", [(6,), (6, 30), (6, 30, 30)])
def test_an_eviction_that_fails_behind_a_reply_fails_nobody(lengths: tuple[int, ...]):
    engine = counting()
    replies = decoding(engine, *lengths)
    sequences = engine.loop.executor.running.sequences
    waiting = engine.submit(engine_request(range(200), 5))
    evictor = engine.cache._evictor
    evictor.shrink = fails_once(evictor.shrink, lambda: replies[0].look() and replies[0].ending)
    engine.finish(*replies, waiting)
    assert engine.metrics.failures == 1
    assert [reply.tokens for reply in replies] == whole_replies(*lengths)
    assert not isinstance(waiting.ending, Failed)
    assert not any(sequence.excluded_from_batches for sequence in sequences)
    check(engine)


def test_an_eviction_that_fails_behind_a_chunk_fails_no_prompt():
    engine = counting()
    prompt, evictor, chunks = tuple(range(200)), engine.cache._evictor, engine.loop.executor.running
    evictor.shrink = fails_once(evictor.shrink, lambda: chunks.prefills)
    reply = engine.submit(engine_request(prompt, 5))
    engine.finish(reply)
    assert engine.metrics.failures == 1
    assert reply.tokens == counted(prompt, 5)
    assert engine.metrics.prefilled_tokens == len(prompt) - 1
    check(engine)


def decoding_before_a_failing_eviction() -> tuple[Cached, list[Watched]]:
    engine = counting()
    replies = decoding(engine, 30, 30)
    evictor = engine.cache._evictor
    evictor.shrink = fails_once(evictor.shrink, lambda: True)
    return engine, replies


def test_an_eviction_that_fails_behind_a_preempted_reply_does_not_end_it():
    engine, replies = decoding_before_a_failing_eviction()
    with mx.stream(generation_stream):
        engine.loop.executor.execute(PreemptRequest(replies[0].generation.number, 1.0), 1.0)
    assert engine.metrics.failures == 1
    engine.finish(*replies)
    assert [reply.tokens for reply in replies] == whole_replies(30, 30)
    check(engine)


def test_an_eviction_that_fails_behind_a_cancelled_reply_does_not_make_it_a_failed_one():
    engine, replies = decoding_before_a_failing_eviction()
    replies[0].generation.cancel()
    engine.finish(replies[1])
    assert engine.metrics.failures == 1
    assert not isinstance(replies[0].ending, Failed)
    assert replies[1].tokens == whole_replies(30, 30)[1]
    check(engine)


# --------------------------------------------------------------------------------------------------- steps


def test_a_step_that_has_failed_is_not_blamed_on_who_is_preempted(monkeypatch: pytest.MonkeyPatch):
    """What a device has failed to compute raises wherever its results are read."""
    engine = counting()
    replies = decoding(engine, 30, 30)
    (poisoned,) = engine.loop.executor.running.decoder.groups

    def poison(name: str) -> None:
        working = getattr(BatchGroup, name)

        def failing(group: BatchGroup, *arguments: Any) -> Any:
            if group is poisoned:
                raise Breakdown("broken on purpose")
            return working(group, *arguments)

        monkeypatch.setattr(BatchGroup, name, failing)

    for name in ("wait", "release", "remove"):
        poison(name)
    number = replies[0].generation.number
    with mx.stream(generation_stream):
        engine.loop.executor.execute(PreemptRequest(number, 1.0), 1.0)
    engine.finish(*replies)
    assert [reply.tokens for reply in replies] == whole_replies(30, 30)
    assert engine.metrics.failures == 1


def test_a_failure_in_cleaning_up_is_printed_too(monkeypatch: pytest.MonkeyPatch, capfd):
    engine = counting()
    decoding(engine, 30)

    def failing(words: str) -> Callable[..., None]:
        def fail(*_: Any, **__: Any) -> None:
            raise Breakdown(words)

        return fail

    monkeypatch.setattr(EngineSequence, "accept", failing("the step"))
    monkeypatch.setattr(BatchGroup, "remove", failing("the clean-up"))
    engine.step()
    printed = capfd.readouterr().err
    assert "Breakdown: the step" in printed
    assert "Breakdown: the clean-up" in printed


def test_a_reply_that_fails_when_nobody_reads_the_output_takes_no_other_with_it(
    monkeypatch: pytest.MonkeyPatch,
):
    """As after the terminal or the pipe of a service has gone."""
    engine = counting()
    replies = decoding(engine, 30, 30)
    monkeypatch.setattr(EngineSequence, "accept", fails_once(EngineSequence.accept, lambda: True))
    reads, writes = os.pipe()
    os.close(reads)
    with monkeypatch.context() as unread, os.fdopen(writes, "wb", buffering=0) as pipe:
        unread.setattr(sys, "stderr", io.TextIOWrapper(pipe, write_through=True))
        engine.step(5)
    engine.finish(*replies)
    wholes = zip(replies, whole_replies(30, 30), strict=True)
    kept = [reply.tokens == whole for reply, whole in wholes if not isinstance(reply.ending, Failed)]
    assert kept == [True], "one fails, and the other is whole"
    check(engine)


def test_whoever_has_gone_with_another_is_not_ended_once_more(monkeypatch: pytest.MonkeyPatch):
    engine = counting()
    replies = decoding(engine, 30, 30, 30)

    def failing(*_: Any) -> None:
        raise Breakdown("broken on purpose")

    monkeypatch.setattr(BatchGroup, "remove", failing)
    monkeypatch.setattr(BatchGroup, "is_broken", property(lambda _: False, lambda *_: None), raising=False)
    for reply in replies:
        reply.generation.cancel()
    engine.step()
    assert engine.metrics.failures == 1
    assert not engine.loop.executor.running.sequences


def test_what_is_late_and_gone_is_ended_once():
    clock = Clock()
    engine = counting(clock=clock, time_limits=TimeLimits(deadline_s=10))
    replies = decoding(engine, 30, 30)
    clock.now += 60
    replies[0].generation.cancel()
    engine.step()
    engine.finish(replies[1])
    assert engine.metrics.failures == 0
    assert isinstance(replies[1].ending, Finished)


def test_planning_that_fails_step_after_step_fails_its_requests(monkeypatch: pytest.MonkeyPatch):
    engine = counting()
    (reply,) = decoding(engine, 200)
    waiting = engine.submit(engine_request(range(100), 5))
    planner = engine.loop._planner

    def failing() -> Any:
        raise Breakdown("broken on purpose")

    with monkeypatch.context() as broken:
        broken.setattr(planner, "_prefill_parts", failing)
        engine.finish(reply, waiting, max_steps=10)
    assert isinstance(waiting.ending, Failed)
    assert engine.say(PROMPTS[1], 5).tokens == counted(PROMPTS[1], 5)


def test_a_prompt_that_cannot_be_cut_is_computed_no_further(monkeypatch: pytest.MonkeyPatch):
    engine = counting()
    long = engine.submit(engine_request(range(900), 5))
    engine.step_until(lambda: long.progress)

    def failing(_: EngineSequence) -> None:
        raise Breakdown("broken on purpose")

    monkeypatch.setattr(EngineSequence, "cut", failing)
    monkeypatch.setattr(engine.loop._planner, "_is_late", lambda *_: True)
    engine.step()
    assert sum(isinstance(event, Failed) for event in long.look()) == 1
    assert not engine.loop.executor.running.prefills
    assert engine.metrics.failures == 1


def test_a_guided_reply_whose_draft_was_being_verified_is_retried():
    """A guide that has read the draft goes back to the reply's tokens."""
    engine, _ = bold()
    reply = engine.submit(engine_request(range(5, 14), 60, draft_texts=(ALL,)))
    engine.step_until(lambda: len(reply.tokens) > 2)
    (sequence,) = engine.loop.executor.running.decoder.sequences
    forgotten: list[int] = []
    sequence.forget_draft = lambda accepted=0: forgotten.append(accepted)
    assert engine.loop.executor.running.decoder.groups[0]._verified
    with mx.stream(generation_stream):
        engine.loop.executor.recovery.retry_decoding()
    assert forgotten == [0]


# ------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("fails", ["positions", "with_kept"])
def test_a_prompt_whose_opening_fails_late_leaves_no_cache(fails: str, monkeypatch: pytest.MonkeyPatch):
    engine = counting()
    opener = engine.cache.opener

    def failing(*_: Any) -> Any:
        raise Breakdown("broken on purpose")

    if fails == "positions":
        monkeypatch.setattr("start_llm.cache.opening.message_ends", failing)
    else:
        monkeypatch.setattr(opener, "with_kept", failing)
    assert isinstance(engine.say(range(90), 5).ending, Failed)
    assert not list(engine.cache._store.seq_caches)
    assert engine.metrics.failures == 1


def test_preempted_requests_that_fail_with_all_others_leave_what_the_next_turn_may_take():
    engine = counting()
    replies = decoding(engine, 200, 200)
    number = replies[0].generation.number
    with mx.stream(generation_stream):
        engine.loop.executor.execute(PreemptRequest(number, 1.0), 1.0)
        engine.loop.executor.recovery.abandon_everything()
    kept = list(engine.cache._store.seq_caches)
    assert kept
    assert not any(seq_cache.is_paused for seq_cache in kept)


def test_a_sequence_that_is_retried_does_not_count_as_computed():
    """Else it would overtake longer prompts for the few tokens that it seems to lack."""
    engine = counting()
    decoding(engine, 200, 200)
    sequences = engine.loop.executor.running.decoder.sequences
    with mx.stream(generation_stream):
        engine.loop.executor.recovery.retry_decoding()
    assert [sequence.seq_cache.tokens for sequence in sequences] == [[], []]


def test_the_cache_knows_at_once_what_merged_caches_hold():
    engine = counting()
    replies = [engine.submit(engine_request(prompt, 50)) for prompt in PROMPTS[:2]]
    noted: list[int] = []
    join = StepExecutor._join

    def joined(executor: StepExecutor, part: Any) -> None:
        join(executor, part)
        noted.append(executor._cache.batched_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepExecutor, "_join", joined)
        engine.step_until(lambda: all(reply.tokens for reply in replies))
    assert noted[-1] > 0
    with mx.stream(generation_stream):
        engine.loop.executor.recovery.retry_decoding()
    assert engine.cache.batched_bytes == 0


# -------------------------------------------------------------------------------------------- idle and disk


def test_idle_work_that_the_disk_is_read_for_has_its_place():
    """What is read for it lies in the memory that it is measured against."""
    admission = Admission(cost=SequenceCost(token_bytes=2 * 32 * 4))
    engine = counting(admission=admission)
    work = engine.submit(idle())
    engine.loop._receive_all()
    first = engine.loop.schedule.first
    assert first
    first.wait, first.waits_until = DiskWait(), 1e9
    engine.cache.resize(1)
    engine.step(3)
    assert not work.generation.cancelled
    first.wait.is_over = True
    engine.step(3)
    assert work.generation.cancelled


def test_a_background_prompt_that_the_disk_is_read_for_takes_no_place():
    engine = counting(max_sequences=1)
    other = engine.submit(background(range(300), 5))
    engine.loop._receive_all()
    first = engine.loop.schedule.first
    assert first
    first.wait, first.waits_until = DiskWait(), 1e9
    assert engine.say(PROMPTS[0], 5).tokens == counted(PROMPTS[0], 5)
    first.wait.is_over = True
    engine.finish(other)


# ------------------------------------------------------------------------------------------ text and times


def many_replies(engine: Cached, count: int) -> list[Watched]:
    replies = [engine.submit(engine_request(range(start, start + 9), 100)) for start in range(count)]
    engine.step_until(lambda: all(reply.tokens for reply in replies))
    return replies


def test_text_is_sent_when_the_turn_ends():
    """Another model may compute for half a second then."""
    engine = counting(max_sequences=12)
    replies = many_replies(engine, 10)
    sequences = engine.loop.executor.running.decoder.sequences
    engine.step(2)
    sent = [len(reply.tokens) for reply in replies]
    engine.loop.end_turn()
    accepted = [len(sequence.tokens) - 9 for sequence in sequences]
    assert sorted(len(reply.tokens) for reply in replies) == sorted(accepted)
    assert sum(accepted) > sum(sent), "some of it had been held"


def test_tokens_of_a_draft_are_no_crowd(monkeypatch: pytest.MonkeyPatch):
    class Longer(DraftGain):
        def lengths(self) -> tuple[int, ...]:
            return (15,) * (1 + len(MATCHES))

    gain = Longer(PassTimes(CHEAP))
    engine, later = counting(gain=gain), list[float]()
    monkeypatch.setattr(Generation, "send_at_intervals", lambda _, now: later.append(now))
    reply = engine.say(range(5, 14), 90, draft_texts=(ALL,))
    assert reply.tokens == counted(range(5, 14), 90)
    assert gain.metrics.accepted_tokens > 60
    assert not later


def test_a_task_between_two_steps_is_no_time_of_a_pass(monkeypatch: pytest.MonkeyPatch):
    class Seconds(PassTimes):
        def note(self, tokens: int, seconds: float) -> None:
            taken.append(seconds)

    def task() -> None:
        now[0] += 100

    now, taken = [0.0], list[float]()
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    engine = counting(gain=DraftGain(Seconds()))
    reply = engine.submit(engine_request(range(30), 20))
    engine.step_until(lambda: len(reply.tokens) > 2)
    for patience_s in (0.0, 0.0, 1.0):
        engine.inbox.put(EngineTask("vectors", task, patience_s=patience_s))
        engine.step(3)
    assert now[0] == 300
    assert taken
    assert max(taken) < 1


# ----------------------------------------------------------------------------------------------- followers


def test_a_request_that_followers_do_not_get_is_not_computed():
    engine = counting()
    followers = engine.loop._followers
    followers.take_request = fails_once(followers.take_request, lambda: True)
    refused, reply = (engine.submit(engine_request(prompt, 5)) for prompt in PROMPTS[:2])
    engine.finish(refused, reply)
    assert refused.ending == Failed("The engine failed: OutOfRoom: broken on purpose")
    assert reply.tokens == counted(PROMPTS[1], 5)
    assert engine.metrics.prefilled_tokens == len(PROMPTS[1]) - 1
    check(engine)
