"""The disk thread: order, errors, the end."""

import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from start_llm.storage.disk_thread import DiskThread


@pytest.fixture
def errors() -> list[Exception]:
    return []


@pytest.fixture
def thread(errors: list[Exception]) -> Iterator[DiskThread]:
    thread = DiskThread(errors.append)
    thread.start()
    yield thread
    assert thread.close(5)


def held(thread: DiskThread) -> threading.Event:
    """Keep the thread busy until the event that this returns is set."""
    began, go = threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        go.wait(5)

    thread.submit(wait)
    assert began.wait(5)
    return go


def test_urgent_jobs_run_first_and_the_others_in_order(thread: DiskThread):
    done: list[str] = []
    go = held(thread)
    for name in ("a", "b"):
        thread.submit(lambda name=name: done.append(name))
    for name in ("x", "y"):
        thread.submit(lambda name=name: done.append(name), is_urgent=True)
    go.set()
    assert thread.close(5)
    assert done == ["x", "y", "a", "b"]


def test_a_job_for_later_waits(thread: DiskThread):
    done = threading.Event()
    began = time.monotonic()
    thread.submit(done.set, after_s=0.2)
    assert done.wait(5)
    assert time.monotonic() - began >= 0.2


def test_the_end_runs_what_is_queued_and_what_is_for_later(thread: DiskThread):
    done: list[str] = []
    go = held(thread)
    thread.submit(lambda: done.append("later"), after_s=3600)
    thread.submit(lambda: done.append("now"))
    go.set()
    assert thread.close(5)
    assert sorted(done) == ["later", "now"]
    assert not thread.submit(lambda: done.append("too late"))


def fail() -> None:
    raise ZeroDivisionError


def test_a_job_that_raises_is_reported_and_the_next_one_runs(thread: DiskThread, errors: list[Exception]):
    done = threading.Event()
    thread.submit(fail)
    thread.submit(done.set)
    assert done.wait(5)
    assert [type(error) for error in errors] == [ZeroDivisionError]


def test_a_report_that_raises_does_not_end_the_thread():
    """The terminal may be gone to which it is written."""
    thread = DiskThread(lambda _: fail())
    thread.start()
    done = threading.Event()
    thread.submit(fail)
    thread.submit(done.set)
    assert done.wait(5)
    assert thread.close(5)


def test_jobs_that_may_wait_run_last(thread: DiskThread):
    done: list[str] = []
    go = held(thread)
    thread.submit(lambda: done.append("a"), may_wait=True)
    thread.submit(lambda: done.append("b"))
    thread.submit(lambda: done.append("c"), is_urgent=True)
    go.set()
    assert thread.close(5)
    assert done == ["c", "b", "a"]


def test_what_a_job_holds_is_let_go_of_when_it_is_done(thread: DiskThread):
    """Not when the next one comes: it may be memory that belongs to another thread by then."""
    lent = threading.Event()
    there = weakref.ref(lent)
    thread.submit(lent.set)
    assert lent.wait(5)
    del lent
    end = time.monotonic() + 5
    while there() is not None and time.monotonic() < end:
        time.sleep(0.01)
    assert there() is None


def test_one_that_does_not_end_is_not_waited_for(errors: list[Exception]):
    thread = DiskThread(errors.append)
    thread.start()
    go = held(thread)
    assert not thread.close(0.1)
    go.set()
    assert thread.close(5)


def test_a_thread_that_was_never_started_can_be_closed(errors: list[Exception]):
    assert DiskThread(errors.append).close(1)
