"""A key gets no more requests at once and tokens a minute than it may have."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import count
from threading import Thread, Timer

import pytest

from start_llm.access.key_limits import LIMIT_HEADERS, KeyLimits, TokensLeft
from start_llm.core.errors import RateLimited

ANN, BEN = b"ann", b"ben"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def left(limits: KeyLimits, tenant: bytes = ANN) -> int:
    with limits.request(tenant) as tokens:
        assert tokens
        return tokens.left


def wait(limits: KeyLimits) -> str:
    """Seconds after which a refused client is to come again."""
    with pytest.raises(RateLimited) as refused, limits.request(ANN):
        pass
    return refused.value.headers["Retry-After"]


def test_without_limits_nothing_is_refused_or_reported():
    limits = KeyLimits()
    limits.count_tokens(ANN, 10**9)
    with ExitStack() as stack:
        assert {stack.enter_context(limits.request(ANN)) for _ in range(100)} == {None}


def test_one_request_too_many_is_refused_until_another_one_has_ended():
    limits = KeyLimits(requests=2, patience_s=0)
    with limits.request(ANN), limits.request(BEN):
        with limits.request(ANN):
            assert wait(limits) == "1"
            with limits.request(BEN):
                pass
        with limits.request(ANN):
            pass


def test_a_request_waits_for_one_that_is_about_to_end():
    limits, first = KeyLimits(requests=1, patience_s=20), ExitStack()
    first.enter_context(limits.request(ANN))
    ending = Timer(0.05, first.close)
    ending.start()
    with limits.request(ANN):
        ending.join()


def test_a_request_that_fails_counts_no_more():
    limits = KeyLimits(requests=1, patience_s=0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), limits.request(ANN):
            raise ZeroDivisionError


def test_tokens_come_back_within_a_minute(clock: Clock):
    limits = KeyLimits(tokens_per_minute=60, clock=clock)
    limits.count_tokens(ANN, 40)
    assert (left(limits), left(limits, BEN)) == (20, 60)
    clock.now = 10
    assert left(limits) == 30
    clock.now = 100
    assert left(limits) == 60


def test_what_was_taken_too_much_is_waited_for(clock: Clock):
    limits = KeyLimits(tokens_per_minute=60, clock=clock)
    limits.count_tokens(ANN, 160)
    assert wait(limits) == "101"
    clock.now = 100.5
    assert wait(limits) == "1"
    clock.now = 101
    assert left(limits) == 1


def test_a_key_that_has_all_of_its_limits_left_is_forgotten(clock: Clock):
    limits = KeyLimits(requests=1, tokens_per_minute=60, clock=clock)
    limits.count_tokens(ANN, 30)
    for number in range(50):
        assert left(limits, b"%d" % number) == 60
    assert len(limits._uses) == 2, "the last one, and who has taken something"
    clock.now = 60
    assert left(limits, BEN) == 60
    assert len(limits._uses) == 1


def test_headers_tell_what_is_left_as_each_api_does():
    tokens = TokensLeft(limit=60, left=20, full_in_s=40)
    openais, anthropics = tokens.openai_headers(), tokens.anthropic_headers()
    assert [*openais.values()] == ["60", "20", "40.000s"]
    assert [*anthropics.values()][:2] == ["60", "20"]
    assert anthropics["anthropic-ratelimit-tokens-reset"].endswith("Z")
    assert {*openais, *anthropics} == {*LIMIT_HEADERS}


def test_threads_are_counted_each(clock: Clock):
    limits, refused = KeyLimits(requests=3, patience_s=0, clock=clock), count()

    def ask() -> None:
        for _ in range(200):
            try:
                with limits.request(ANN):
                    pass
            except RateLimited:
                next(refused)

    threads = [Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert next(refused) == 0
    with limits.request(ANN), limits.request(ANN), limits.request(ANN):
        assert wait(limits) == "1"
