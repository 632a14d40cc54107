"""Signs of life while another thread waits."""

from __future__ import annotations

import threading
import time

import pytest

from start_llm.core.errors import ClientGone, NotFound
from start_llm.server.life_signs import repeated


def test_an_action_is_repeated_until_the_block_ends_and_never_afterwards():
    called, times = threading.Semaphore(0), list[float]()

    def act() -> None:
        times.append(time.monotonic())
        called.release()

    with repeated(act, 0.01):
        for _ in range(3):
            assert called.acquire(timeout=10)
    count = len(times)
    threading.Event().wait(0.1)
    assert len(times) == count >= 3


def test_a_block_that_is_short_has_none():
    with repeated(lambda: pytest.fail("too early"), 10):
        pass


def test_a_running_action_is_waited_for():
    """Two threads never write to one client."""
    begun, has_ended = threading.Event(), list[bool]()

    def act() -> None:
        begun.set()
        threading.Event().wait(0.1)
        has_ended.append(True)

    with repeated(act, 0.01):
        assert begun.wait(10)
    assert has_ended


def test_a_client_that_has_gone_is_reported_once_the_block_has_ended():
    tried = list[int]()

    def act() -> None:
        tried.append(1)
        raise ClientGone("hung up")

    with pytest.raises(ClientGone, match="hung up"), repeated(act, 0.01):
        threading.Event().wait(0.2)
    assert len(tried) == 1


def test_an_error_of_the_block_comes_first():
    def act() -> None:
        raise ClientGone("hung up")

    with pytest.raises(NotFound), repeated(act, 0.01):
        threading.Event().wait(0.1)
        raise NotFound("nothing")
