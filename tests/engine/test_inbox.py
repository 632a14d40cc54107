"""What counts as waiting in the queue of the engine thread."""

from __future__ import annotations

import threading

from start_llm.engine.cache_probe import CacheProbe
from start_llm.engine.generation import Generation
from start_llm.engine.inbox import DiskNews, Inbox
from tests.engine.harness import engine_request


def test_news_of_the_disk_and_questions_are_no_requests():
    inbox = Inbox()
    for _ in range(50):
        inbox.put(DiskNews())
        inbox.put(CacheProbe(engine_request((1, 2, 3))))
    assert inbox.requests == 0
    inbox.put(Generation(engine_request((1, 2, 3))))
    inbox.put(Generation(engine_request((1, 2, 3))))
    assert inbox.requests == 2


def test_a_request_that_was_taken_waits_no_longer():
    inbox = Inbox()
    for _ in range(3):
        inbox.put(Generation(engine_request((1, 2, 3))))
    assert not inbox.is_empty
    assert len(inbox.take_all()) == 3
    assert inbox.requests == 0
    assert inbox.is_empty
    assert inbox.take_all() == []


def test_whatever_comes_sets_the_event_that_several_share():
    work_event = threading.Event()
    inboxes = [Inbox(work_event), Inbox(work_event)]
    for inbox in inboxes:
        inbox.put(DiskNews())
        assert work_event.is_set()
        work_event.clear()
