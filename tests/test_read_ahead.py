"""What was read ahead is judged by what requests then find of it."""

from __future__ import annotations

import queue
import threading
import time
from array import array
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from start_llm.core.canonical import CanonicalKey
from start_llm.core.chat import ChatRequest, Message
from start_llm.core.engine_request import EngineRequest
from start_llm.core.events import Event, Finished, Prefilling, Restored, Usage
from start_llm.core.sequence_cost import SequenceCost
from start_llm.engine.admission import Admission
from start_llm.engine.generation import Generation
from start_llm.serving import read_ahead
from start_llm.serving.read_ahead import ReadAhead
from start_llm.telemetry.metrics import IdleMetrics
from start_llm.transcripts.beginnings import Beginning, Beginnings
from start_llm.transcripts.recorded_details import Claims, MessageDetails
from start_llm.transcripts.transcript_store import PrefixNode
from tests.engine.test_guards import counting
from tests.transcripts.fakes import transcripts

LENGTH, FROM_DISK = 200, 150


class FakeGeneration:
    """A prewarm of which `FROM_DISK` tokens come from the disk."""

    cancelled = False

    def __init__(self, request: EngineRequest) -> None:
        tokens = len(request.prompt)
        self._events: list[Event] = [
            Restored(FROM_DISK, disk_tokens=FROM_DISK),
            Prefilling(tokens - 1, tokens),
            Finished("length", Usage(prompt=tokens, cached=FROM_DISK, completion=0)),
        ]

    def take(self, timeout_s: float) -> list[Event]:
        del timeout_s
        events, self._events = self._events, []
        return events


class FakeEngine:
    def __init__(self) -> None:
        self.submitted: list[EngineRequest] = []

    def submit(self, request: EngineRequest) -> FakeGeneration:
        self.submitted.append(request)
        return FakeGeneration(request)

    def peek(self, request: EngineRequest) -> Restored:
        """The disk has all conversations of one tenant but the last 600 tokens of long ones."""
        length = len(request.prompt)
        return Restored(0, stored=(length - 600 if length > 1000 else length - 60) * (request.salt == b"us"))


class SharedDisk(FakeEngine):
    """The disk has all of our conversations, and of them what others begin with too."""

    def peek(self, request: EngineRequest) -> Restored:
        length = len(request.prompt)
        return Restored(0, stored=length - 60 if request.salt == b"us" else min(length, 300))


type Talk = tuple[str, int, int]
"""A conversation of ours: the name of its session, the index of its last message, its tokens."""


def of(number: int, length: int = LENGTH) -> Beginning:
    return Beginning(b"us", "pi", array("I", range(number, number + length)))


@contextmanager
def reading(
    *known: Beginning,
    window: int = 1000,
    may_work: bool = True,
    talks: Sequence[Talk] = (),
    engine: Any = None,
) -> Generator[Any]:
    beginnings = Beginnings()
    for beginning in known:
        beginnings.note(beginning)
    recorded = transcripts(lambda _: b"", lambda _: (), beginnings=beginnings)
    for name, depth, length in talks:
        ids = array("I", range(length))
        place = PrefixNode(CanonicalKey(name.encode()), depth, length, b"us")
        details = [MessageDetails(())] * (depth + 1)
        recorded.store.add(place, ids, details, claims=Claims(), session=name)
    requests: Any = SimpleNamespace(model=SimpleNamespace(context_window=window))
    engine, metrics = engine or FakeEngine(), IdleMetrics()
    ahead = ReadAhead(engine, requests, recorded, metrics, lambda: may_work)
    ahead.begin()
    try:
        yield SimpleNamespace(ahead=ahead, engine=engine, metrics=metrics)
    finally:
        ahead.close()


class FullEngine:
    """A real loop without room for idle work, which takes a step whenever it is asked for something."""

    def __init__(self) -> None:
        self.stepper = counting(admission=Admission(cost=SequenceCost(token_bytes=256)))
        self.stepper.cache.resize(0)
        self.submitted: list[EngineRequest] = []

    def submit(self, request: EngineRequest) -> Generation:
        self.submitted.append(request)
        generation = self.stepper.submit(request).generation
        self.stepper.step()
        return generation


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "_SETTLES_S", 0.001)


def wait_for_works(read_ahead: Any, count: int) -> None:
    end = time.monotonic() + 10
    while read_ahead.metrics.works < count:
        assert time.monotonic() < end
        time.sleep(0.005)
    time.sleep(0.02)  # for more of them


def test_beginnings_are_read_the_one_used_last_first():
    with reading(of(0), of(1000)) as reader:
        wait_for_works(reader, 2)
    assert [work.prompt.ids[0] for work in reader.engine.submitted] == [1000, 0]
    (request, _) = reader.engine.submitted
    assert (request.is_idle_work, request.max_tokens, request.salt) == (True, 0, b"us")
    assert (request.boundaries, len(request.prompt)) == ((LENGTH - 1,), LENGTH)
    assert reader.metrics == IdleMetrics(
        works=2, read_tokens=2 * (LENGTH - 1 - FROM_DISK), restored_tokens=2 * FROM_DISK
    )


def test_a_request_that_begins_so_has_used_it_once():
    with reading(of(0)) as reader:
        wait_for_works(reader, 1)
        for session in ("one", "two"):
            reader.ahead.note_restored((b"us", session), [*range(LENGTH - 1), 7, 7], LENGTH - 1)
    assert reader.metrics.used_tokens == LENGTH - 1


def test_requests_of_others_use_nothing():
    with reading(of(0)) as reader:
        wait_for_works(reader, 1)
        reader.ahead.note_restored((b"them", "one"), range(LENGTH), LENGTH - 1)
        reader.ahead.note_restored((b"us", "one"), range(500, 700), 0)
    assert reader.metrics.used_tokens == 0


def test_a_beginning_that_nobody_uses_counts_as_unused():
    with reading(of(0)) as reader:
        wait_for_works(reader, 1)
        for number in range(15):
            reader.ahead.note_restored((b"us", str(number)), range(500, 700), 0)
        assert not reader.ahead._judged
        reader.ahead.note_restored((b"us", "last"), range(500, 700), 0)
        assert list(reader.ahead._judged) == [(0, LENGTH - 1)]
        reader.ahead.note_restored((b"us", "later"), range(LENGTH), LENGTH - 1)
    assert reader.metrics.used_tokens == 0


def test_what_does_not_fit_the_window_is_not_read_and_no_more_than_four_are():
    with reading(*(of(300 * n) for n in range(6)), of(5000, 1000)) as reader:
        wait_for_works(reader, 3)
    assert [work.prompt.ids[0] for work in reader.engine.submitted] == [1500, 1200, 900]


def test_conversations_that_came_back_are_read_those_with_most_messages_first():
    """Of a long one only what the disk is known to have; none that was asked once, or fills the window."""
    talks = [("once", 2, 500), ("twice", 4, 500), ("often", 20, 1500), ("longer", 30, 3000)]
    with reading(of(5000, 100), talks=talks, window=2500) as reader:
        wait_for_works(reader, 3)
        reader.ahead.note_restored((b"us", "twice"), range(500), 499)
    _, often, twice = reader.engine.submitted
    assert (len(often.prompt), often.salt, often.is_idle_work) == (1501 - 600 + 1, b"us", True)
    assert (len(twice.prompt), twice.salt) == (501, b"us")
    assert reader.metrics.used_tokens == 499


def test_a_conversation_is_read_for_the_tenant_whose_it_is():
    """Theirs begin as ours do, and were used later."""
    theirs = Beginning(b"them", "pi", array("I", range(300)))
    with reading(of(5000, 100), theirs, talks=[("ours", 4, 500)], engine=SharedDisk()) as reader:
        wait_for_works(reader, 3)
    assert [(work.salt, len(work.prompt)) for work in reader.engine.submitted] == [
        (b"them", 300),
        (b"us", 100),
        (b"us", 501),
    ]


def test_a_conversation_of_a_tenant_who_never_began_with_the_plain_model_is_not_read():
    """Its pages may be of an adapter, whose tenants are others."""
    theirs = Beginning(b"them", "pi", array("I", range(300)))
    with reading(theirs, talks=[("ours", 4, 500)], engine=SharedDisk()) as reader:
        wait_for_works(reader, 1)
    assert [work.salt for work in reader.engine.submitted] == [b"them"]


def test_what_has_no_room_in_the_cache_is_passed_over(monkeypatch: pytest.MonkeyPatch):
    """The thread that waited for its end waited for ever."""
    monkeypatch.setattr(read_ahead, "_POLL_S", 0.01)
    engine = FullEngine()
    with reading(of(0), of(1000), engine=engine) as reader:
        end = time.monotonic() + 2
        while len(engine.submitted) < 2 and time.monotonic() < end:
            time.sleep(0.005)
    assert [request.prompt.ids[0] for request in engine.submitted] == [1000, 0]
    assert reader.metrics.works == 0


def test_nothing_is_read_while_the_machine_may_not_work():
    with reading(of(0), may_work=False) as reader:
        time.sleep(0.15)
    assert not reader.engine.submitted


def test_what_ends_the_thread_leaves_no_replies_that_nobody_receives(monkeypatch: pytest.MonkeyPatch):
    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    ended: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", ended.append)
    monkeypatch.setattr(ReadAhead, "_next", broken)
    with reading(of(0)) as reader:
        reader.ahead._thread.join(10)
        for _ in range(3):
            reader.ahead.note_reply(ChatRequest(messages=()), Message(role="assistant", content=""))
        assert reader.ahead._replies.empty()
    assert [end.exc_type for end in ended] == [ZeroDivisionError]


class BreakingEngine(FakeEngine):
    """Fails for the first work, in a way that nobody expects."""

    def submit(self, request: EngineRequest) -> FakeGeneration:
        if not self.submitted:
            self.submitted.append(request)
            raise ZeroDivisionError
        return super().submit(request)


def test_a_work_that_fails_is_reported_and_the_next_one_is_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """There was no idle work any more until the next start, and nothing to see of that but a traceback."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # what ends the thread fails no other test
    with reading(of(0), of(1000), engine=BreakingEngine()) as reader:
        wait_for_works(reader, 1)
        assert reader.ahead._thread.is_alive()
    assert [work.prompt.ids[0] for work in reader.engine.submitted] == [1000, 0]
    assert capsys.readouterr().err.count("Traceback") == 1


def test_without_beginnings_no_thread_is_started():
    with reading() as reader:
        assert reader.ahead._thread is None


def test_a_close_just_before_it_looks_for_replies_ends_it(monkeypatch: pytest.MonkeyPatch):
    """What wakes the thread is received while there still is work to do, so nothing wakes it after that."""
    begun = threading.Event()
    closers: list[threading.Thread] = []

    class Replies(queue.SimpleQueue[Any]):
        def empty(self) -> bool:
            begun.wait(10)
            if not closers:
                closers.append(threading.Thread(target=reader.ahead.close))
                closers[0].start()
                while super().empty():
                    time.sleep(0.001)
            return super().empty()

    monkeypatch.setattr(queue, "SimpleQueue", Replies)
    with reading(of(0)) as reader:
        begun.set()
        reader.ahead._thread.join(5)
        assert not reader.ahead._thread.is_alive()
    closers[0].join(5)
    assert len(reader.engine.submitted) == 1, "it had begun with that"
