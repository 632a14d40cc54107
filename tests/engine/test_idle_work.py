"""Idle work is given up for whatever arrives, takes free memory only, and uses nothing."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generation_stream

from start_llm.core.engine_request import EngineRequest
from start_llm.core.events import Finished
from start_llm.core.sequence_cost import SequenceCost
from start_llm.engine.admission import Admission
from start_llm.engine.resources import TimeLimits
from start_llm.engine.step_plan import PreemptRequest
from tests.cache.conversations import Cached
from tests.engine.harness import CHUNK, engine_request
from tests.engine.test_guards import check, counting
from tests.engine.test_prewarm import LONG, PROMPT, restored
from tests.engine.test_turns import Clock
from tests.ties import Tally, greedy_reference

HOURS = 10_000.0
"""Seconds."""


def idle(prompt: Any = LONG, **more: Any) -> EngineRequest:
    return engine_request(prompt, 0, is_idle_work=True, **more)


def uses(stepper: Cached) -> list[tuple[Any, ...]]:
    """When everything that is kept was used last, and how often."""
    store = stepper.cache._store
    pages = sorted((page.end, page.tokens, page.last_used, page.uses) for page in store.tree.pages())
    return [*pages, *sorted((checkpoint.position, checkpoint.last_used) for checkpoint in store.checkpoints)]


@pytest.mark.parametrize("has_state", [False, True])
def test_whoever_comes_waits_for_one_chunk_and_what_was_read_is_kept(has_state: bool):
    stepper = counting(has_state=has_state, clock=Clock())
    work = stepper.submit(idle())
    stepper.step_until(lambda: work.progress)
    read = stepper.metrics.prefilled_tokens
    request = stepper.submit(engine_request(LONG[::-1], 5))
    stepper.step()
    assert request.progress
    assert stepper.metrics.prefilled_tokens - read <= CHUNK
    stepper.finish(request)
    assert not stepper.is_busy, "the work is not taken up again"
    assert work.ending is None
    kept = restored(stepper.say(LONG, 2))
    assert kept == read
    check(stepper)


@pytest.mark.parametrize("has_state", [False, True])
def test_what_it_was_restored_from_is_not_given_up_with_it(has_state: bool):
    """Pages that nobody has used are evicted first, and not written to the disk."""
    stepper = counting(has_state=has_state, clock=Clock())
    ends = (100, 290)
    stepper.say(PROMPT, 20, ends)
    before = uses(stepper)
    work = stepper.submit(idle((*PROMPT, *LONG), boundaries=ends))
    stepper.step_until(lambda: work.progress)
    stepper.finish(stepper.submit(engine_request(LONG[::-1], 5)))
    assert work.ending is None
    assert [entry for entry in uses(stepper) if entry in before] == before


def test_it_never_becomes_a_request_like_any_other():
    clock = Clock()
    stepper = counting(clock=clock)
    reply = stepper.submit(engine_request(PROMPT, 1000))
    stepper.step_until(lambda: reply.tokens)
    work = stepper.submit(idle())
    stepper.step()
    clock.now += HOURS
    stepper.step(5)
    assert not work.look(), "a reply is being written"
    reply.generation.cancel()
    stepper.finish(work)
    assert isinstance(work.ending, Finished)


def test_it_does_not_begin_where_something_would_have_to_be_evicted():
    """The counting network has one layer with keys and values of 32 numbers, four bytes each."""
    admission = Admission(cost=SequenceCost(token_bytes=2 * 32 * 4))
    stepper = counting(clock=Clock(), admission=admission)
    stepper.say(PROMPT, 2)
    kept = stepper.cached.page_bytes + stepper.cached.seq_cache_bytes
    stepper.cache.resize(kept + admission.bytes_for([len(LONG)]) // 2)
    before = uses(stepper)
    work = stepper.submit(idle())
    stepper.step(5)
    assert not stepper.is_busy
    assert work.generation.cancelled, "whoever reads its events waits for no more of them"
    assert (work.look(), stepper.cached.evictions, stepper.metrics.prefilled_tokens) == (
        [],
        0,
        len(PROMPT) - 1,
    )
    assert uses(stepper) == before


@pytest.mark.parametrize("has_state", [False, True])
def test_what_requests_have_used_is_as_old_as_before(has_state: bool):
    """So what is evicted next is what would have been evicted next."""
    clock = Clock()
    stepper = counting(has_state=has_state, clock=clock)
    ends = (100, 290)
    stepper.say(PROMPT, 20, ends)
    before = uses(stepper)
    clock.now += HOURS
    work = stepper.submit(idle((*PROMPT, *range(40)), boundaries=ends))
    stepper.finish(work)
    after = uses(stepper)
    assert [entry for entry in after if entry in before] == before
    assert max(entry[-2] if len(entry) == 4 else entry[-1] for entry in after) == max(
        entry[-2] if len(entry) == 4 else entry[-1] for entry in before
    ), "what it read counts as used when its beginning was"
    reply = (*PROMPT, *range(300, 319 + has_state))
    assert restored(stepper.say((*reply, 7, 7), 1, ends)) == len(reply), "the reply is kept too"


def test_it_counts_as_computed_and_not_as_looked_up():
    stepper = counting(clock=Clock())
    stepper.finish(stepper.submit(idle()))
    counts = stepper.cached
    assert (counts.lookups, counts.computed_tokens) == (0, len(LONG) - 1)
    assert restored(stepper.say(LONG, 2)) == len(LONG) - 1


@pytest.mark.thorough
def test_a_reply_after_it_is_that_of_a_cold_server(resources):
    stepper = Cached(resources, clock=Clock())
    stepper.finish(stepper.submit(idle(LONG[:1200])))
    reply = stepper.say(LONG, 20)
    assert restored(reply) == 1199
    Tally().compare(reply.tokens, greedy_reference(resources.network, LONG, 20))


def test_another_work_does_not_end_the_one_that_is_read():
    stepper = counting(clock=Clock())
    first = stepper.submit(idle())
    stepper.step_until(lambda: first.progress)
    second = stepper.submit(idle(LONG[::-1]))
    stepper.finish(first, second)
    assert isinstance(first.ending, Finished) and isinstance(second.ending, Finished)


def test_what_is_late_and_has_no_room_any_more_is_ended_once():
    clock, admission = Clock(), Admission(cost=SequenceCost(token_bytes=2 * 32 * 4))
    stepper = counting(clock=clock, admission=admission, time_limits=TimeLimits(deadline_s=10))
    work = stepper.submit(idle())
    stepper.step_until(lambda: work.progress)
    clock.now += HOURS
    with mx.stream(generation_stream):
        stepper.loop.executor.execute(PreemptRequest(work.generation.number, clock.now), clock.now)
    stepper.cache.resize(1)
    stepper.step()
    assert (stepper.metrics.failures, stepper.is_busy) == (0, False)
    assert stepper.say(PROMPT, 2).tokens
