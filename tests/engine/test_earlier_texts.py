"""Drafts from what a tenant's earlier conversations said, and from nobody else's."""

from __future__ import annotations

import time
from array import array
from dataclasses import replace
from typing import Any

import pytest

from start_llm.core.events import Failed
from start_llm.core.limits import TimeLimits
from start_llm.engine import earlier_texts
from start_llm.engine.draft_gain import DraftGain
from start_llm.engine.draft_index import EARLIER, MATCHES
from start_llm.engine.earlier_texts import EARLIER_BYTES, EarlierTexts
from start_llm.engine.pass_times import PassTimes
from tests.cache.conversations import Cached
from tests.engine.harness import FailsOnce, Wrapped, engine_request, uncached_resources
from tests.engine.test_guards import VOCABULARY, Counting, check
from tests.engine.test_guards_of_drafts import CHEAP, bold
from tests.engine.test_guards_of_turns import counted

READ = tuple(range(5, 60))
BEFORE = (*range(100, 108), 5, 6)
"""The beginning of another conversation, behind which the network counts on from 6."""


def tail(*tokens: int) -> array[int]:
    return array("I", tokens)


def test_the_longest_match_among_the_texts_of_a_tenant_is_found():
    texts = EarlierTexts()
    texts.add(b"a", [1, 2, 3, 4, 5, 6])
    texts.add(b"a", [9, 3, 4, 7, 8])
    assert texts.find(b"a", tail(3, 4), 5) == ((7, 8), 0)
    assert texts.find(b"a", tail(1, 2, 3, 4), 1) == ((5,), 1)
    assert texts.find(b"a", tail(7, 8), 5) is None
    assert texts.find(b"a", tail(4), 5) is None


def test_what_one_tenant_said_is_not_looked_up_for_another():
    texts = EarlierTexts()
    texts.add(b"a", range(50))
    texts.add(b"b", range(100, 150))
    assert texts.find(b"b", tail(7, 8, 9), 5) is None
    assert texts.find(b"c", tail(7, 8, 9), 5) is None


def test_a_tenant_that_says_much_loses_the_oldest_of_it(monkeypatch):
    monkeypatch.setattr(earlier_texts, "_MOST_TOKENS", 4096)
    texts = EarlierTexts()
    for start in range(0, 60_000, 100):
        texts.add(b"a", range(start, start + 100))
        assert texts.nbytes <= 4096 * 12
    assert texts.find(b"a", tail(59_950, 59_951), 1)
    assert texts.find(b"a", tail(50, 51), 1) is None


def test_the_end_of_a_text_that_is_too_long_is_kept(monkeypatch):
    monkeypatch.setattr(earlier_texts, "_MOST_TOKENS", 4096)
    texts = EarlierTexts()
    texts.add(b"a", range(9000))
    assert texts.nbytes <= 4096 * 12
    assert texts.find(b"a", tail(8990, 8991), 2) == ((8992, 8993), 0)
    assert texts.find(b"a", tail(5000, 5001), 1) is None


def test_tenants_that_were_long_silent_are_forgotten():
    texts = EarlierTexts()
    texts.add(b"first", range(50))
    texts.add(b"second", range(50))
    for number in range(6):
        texts.add(bytes([number]), range(50))
    texts.add(b"first", range(60, 90))
    texts.add(b"one more", range(50))
    assert texts.find(b"first", tail(7, 8), 1)
    assert texts.find(b"second", tail(7, 8), 1) is None


@pytest.mark.thorough
def test_all_of_it_takes_no_more_than_is_planned():
    texts = EarlierTexts()
    for number in range(10):
        for _ in range(3):
            texts.add(bytes([number]), range(2**16 - 1))
    assert 0.5 * EARLIER_BYTES < texts.nbytes <= EARLIER_BYTES


def test_a_long_result_is_added_in_passing():
    texts = EarlierTexts()
    texts.add(b"a", range(60_000))
    taken: list[float] = []
    for _ in range(5):
        began = time.perf_counter()
        texts.add(b"a", range(5_000))
        taken.append(time.perf_counter() - began)
    assert min(taken) < 0.005


# ----------------------------------------------------------------------------------------------- in an engine


def reply_of(engine: Cached, salt: bytes = b"me", **more: Any) -> list[int]:
    watched = engine.say(BEFORE, 40, salt=salt, **more)
    check(engine)
    return watched.tokens


def test_a_reply_repeats_what_an_earlier_conversation_read_in_fewer_passes():
    engine, gain = bold()
    reply_of(engine)
    assert gain.metrics.accepted_tokens == 0
    engine.say(READ, 3, salt=b"me")
    assert reply_of(engine, salt=b"you") == counted(BEFORE, 40)
    assert gain.metrics.accepted_tokens == 0
    assert reply_of(engine) == counted(BEFORE, 40)
    assert gain.metrics.accepted_tokens > 20


def test_a_reply_is_never_drafted_from_what_another_tenant_said():
    """Whether its passes are fewer would say what the other has."""
    engine, gain = bold()
    engine.say(READ, 30, salt=b"you")
    reply_of(engine)
    assert gain.metrics.drafts == 0


@pytest.mark.parametrize("has_state", [False, True])
def test_what_a_conversation_has_itself_goes_first(has_state: bool):
    """An earlier one went on otherwise, behind as long a match."""
    engine, gain = bold(has_state=has_state)
    engine.say((*range(5, 40), 99), 1, salt=b"me")
    engine.say(BEFORE, 40, salt=b"me", draft_texts=(READ,))
    assert gain.metrics.accepted_tokens > 20


@pytest.mark.parametrize("ending", ["cancelled", "cut"])
def test_a_reply_that_was_given_up_is_a_source(ending: str):
    ticks = [0.0]
    limits = TimeLimits(deadline_s=5)
    engine, gain = bold(clock=lambda: ticks[0], time_limits=limits)
    given_up = engine.submit(engine_request(READ, 200, salt=b"me"))
    engine.step_until(lambda: len(given_up.tokens) > 3)
    if ending == "cut":
        ticks[0] += 10
    else:
        given_up.generation.cancel()
    engine.step(2)
    assert not engine.is_busy
    drafts = gain.metrics.drafts
    reply_of(engine)
    assert gain.metrics.drafts > drafts


def test_a_prompt_that_was_given_up_and_a_reply_that_failed_are_none():
    fails = FailsOnce(lambda shape: shape == (1, 1), nth=4)
    engine, gain = bold(network=Wrapped(Counting(has_state=False), fails))
    failed = engine.submit(engine_request(READ, 30, salt=b"me"))
    engine.finish(failed)
    assert isinstance(failed.ending, Failed)
    given_up = engine.submit(engine_request(range(VOCABULARY), 30, salt=b"me"))
    engine.step()
    given_up.generation.cancel()
    engine.step(2)
    assert not engine.is_busy
    reply_of(engine)
    assert gain.metrics.drafts == 0


def test_what_the_cache_gave_is_not_added_again(monkeypatch):
    added: list[tuple[int, ...]] = []
    monkeypatch.setattr(EarlierTexts, "add", lambda _, salt, text: added.append(tuple(text)))
    engine, _ = bold()
    first = engine.say(READ, 8, salt=b"me")
    second = engine.say((*READ, *first.tokens, 3, 2, 1), 2, salt=b"me")
    third = engine.say((*range(90, 200), 1), 2, salt=b"me", repeated_tokens=100)
    assert added == [
        (*READ, *first.tokens),
        (3, 2, 1, *second.tokens),
        (*range(190, 200), 1, *third.tokens),
    ]


def test_a_reply_that_was_interrupted_is_added_once(monkeypatch):
    added: list[int] = []
    monkeypatch.setattr(EarlierTexts, "add", lambda _, salt, text: added.append(len(text)))
    ticks = iter(range(10**6))
    limits = TimeLimits(preempt_after_s=1)
    engine, _ = bold(clock=lambda: next(ticks) / 10, max_sequences=1, time_limits=limits)
    replies = [engine.submit(engine_request(range(start, start + 9), 30)) for start in (5, 50)]
    engine.finish(*replies)
    assert engine.metrics.preemptions > 1
    assert added == [39, 39]


def test_nothing_is_kept_where_drafts_do_not_pay(monkeypatch):
    monkeypatch.setattr(EarlierTexts, "add", lambda *_: pytest.fail("something was added"))
    resources = uncached_resources(Counting(has_state=False), lambda _: b"a", frozenset(), 1, batches=False)
    for gain in (None, DraftGain(PassTimes({1: 1.0}))):
        Cached(replace(resources, gain=gain)).say(READ, 30)


def test_what_is_read_while_nobody_waits_is_not_added(monkeypatch):
    """A request has said it, and its own turn adds it."""
    monkeypatch.setattr(EarlierTexts, "add", lambda *_: pytest.fail("something was added"))
    engine, _ = bold()
    engine.say(READ, 1, is_idle_work=True)


def test_a_source_that_is_always_wrong_is_not_drafted_from():
    """Matches of the sequence itself are followed apart, and are drafted all the while."""
    gain = DraftGain(PassTimes(CHEAP))
    for match in range(len(MATCHES)):
        for _ in range(60):
            gain.note_verified(EARLIER + match, 3, 0)
    lengths = gain.lengths()
    assert not any(lengths[EARLIER:])
    assert all(lengths[1 : len(MATCHES)])
    assert len(lengths) == EARLIER + len(MATCHES)
