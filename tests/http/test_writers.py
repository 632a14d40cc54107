"""Each attribute of a shared record has one thread that writes it, or a lock that all of them hold."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from start_llm.storage import database
from start_llm.telemetry import activity, metrics, savings
from start_llm.transcripts import transcript_store as store
from tests import tiny_adapters
from tests.conftest import TinyModel
from tests.server.client import CHAT, TEXT, Client, ask, engine_is_free, wait_until
from tests.serving import Server, serving
from tests.writers import KnownRLock, Recorder, recording

MODULES = metrics, database, activity, savings, store
SOME_THAT_ARE_WRITTEN = """
    EngineMetrics.generated_tokens EngineMetrics.stepped_at CacheMetrics.misses CacheMetrics.evictions
    DiskMetrics.lost DiskMetrics.queue DiskMetrics.errors DiskMetrics.written_files
    TranscriptMetrics.bound TranscriptSizes.nodes RequestMetrics.endings DatabaseMetrics.written
""".split()


def shared_kinds() -> list[type]:
    """The classes of these modules whose attributes can be written."""
    return [
        kind
        for module in MODULES
        for kind in vars(module).values()
        if isinstance(kind, type) and kind.__module__ == module.__name__
        if not issubclass(kind, tuple) and not (dataclasses.is_dataclass(kind) and _is_frozen(kind))
    ]


def _is_frozen(kind: Any) -> bool:
    return bool(kind.__dataclass_params__.frozen)


def talk(server: Server, number: int) -> None:
    """A conversation of a few turns, of which some leave in the middle, with and without an adapter."""
    messages: list[dict[str, str]] = [{"role": "user", "content": f"{number} of the sea. " * 40}]
    for turn in range(4):
        adapter = {"adapter": "a"} if number % 3 == 0 else {}
        body = {"messages": messages, "max_tokens": 8, "session_id": f"talk {number}"} | adapter
        reply = ask(server.port, "POST", "/v1/messages" if number % 3 == 1 else CHAT, body)
        if reply.status != 200:  # the adapter is not mounted at this moment
            continue
        text = (
            reply.json["content"][0]["text"]
            if number % 3 == 1
            else reply.json["choices"][0]["message"]["content"]
        )
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"And {turn}?"}]
        leave_early(server, number * 10 + turn)


def leave_early(server: Server, number: int) -> None:
    with Client(server.port) as client:
        client.request("POST", TEXT, {"prompt": [number, *range(300)], "stream": True})
        client.head()
        client.some(10)


def mount_and_unmount(server: Server) -> None:
    for _ in range(4):
        assert ask(server.port, "POST", "/v1/adapters", {"id": "a"}).status == 200
        time.sleep(0.1)
        ask(server.port, "DELETE", "/v1/adapters/a")


def evict_beside_a_slow_disk(server: Server) -> None:
    """What is evicted then finds no place in the queue of the disk."""
    storage: Any = server.app.runtime.shared.disk
    goes_on = threading.Event()
    storage._thread.submit(lambda: goes_on.wait(60), is_urgent=True)
    try:
        lost, numbers = server.get("/stats")["ssd"]["lost"], iter(range(1000, 1100))
        while server.get("/stats")["ssd"]["lost"] == lost:
            prompt = [next(numbers), *range(300)]
            assert ask(server.port, "POST", TEXT, {"prompt": prompt, "max_tokens": 4}).status == 200
    finally:
        goes_on.set()


def fail_on_the_disk(server: Server) -> None:
    """Bugs in the work of both threads that share the disk."""
    storage: Any = server.app.runtime.shared.disk
    for thread in (storage._thread, storage._database_thread):
        thread.submit(lambda: json.loads("{"))


@pytest.fixture(scope="module")
def recorded(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    """A server under load: chats, clients that leave, adapters, evictions, a disk tier with little room."""
    folder, place = tiny_model("qwen3", hidden=128, layers=2), tmp_path_factory.mktemp("place")
    tiny_adapters.build(folder, place / "adapters" / "a", 1)
    settings: dict[str, Any] = {
        "ssd_folder": str(place / "ssd"),
        "ssd_max_size": 300_000,
        "ssd_write_after_s": 0.02,
        "cache_max_bytes": 400_000,
        "adapter_dir": str(place / "adapters"),
        "max_kv_size": 4096,
        "max_connections": 100,
    }
    with recording(shared_kinds()) as recorder, serving(folder, **settings) as server:
        recorder.begin()
        with ThreadPoolExecutor(8) as clients:
            jobs: list[Future[Any]] = [clients.submit(talk, server, number) for number in range(8)]
            jobs += [clients.submit(mount_and_unmount, server)]
            for path in ("/stats", "/metrics", "/activity", "/health"):
                jobs.append(clients.submit(ask, server.port, "GET", path))
            for job in jobs:
                job.result()
        evict_beside_a_slow_disk(server)
        fail_on_the_disk(server)
        wait_until(lambda: server.get("/stats")["ssd"]["errors"] >= 2, within_s=30)
        wait_until(lambda: engine_is_free(server.port), within_s=60)
        yield recorder


def test_no_attribute_has_two_writers_without_a_lock(recorded: Recorder):
    assert recorded.races == {}


def test_the_load_reaches_what_matters(recorded: Recorder):
    assert set(SOME_THAT_ARE_WRITTEN) <= recorded.written
    assert {"DiskMetrics.lost", "DiskMetrics.queue", "DiskMetrics.errors"} <= recorded.several


# ----------------------------------------------------------------------------------------------- the recorder


class Record:
    def __init__(self) -> None:
        self.unlocked = self.locked = self.mine = self.mixed = 0
        self.lock, self.other = threading.Lock(), threading.RLock()


def written_twice(write: Any) -> Recorder:
    """Two threads write to a record, one after the other."""
    with recording([Record]) as recorder:
        record = Record()
        recorder.begin()
        for name in ("first", "second"):
            thread = threading.Thread(target=write, args=(record, name), name=name)
            thread.start()
            thread.join()
    return recorder


def test_two_writers_without_a_lock_are_found():
    def write(record: Record, _: str) -> None:
        record.unlocked += 1
        with record.lock, record.other:
            record.locked += 1

    recorder = written_twice(write)
    assert recorder.races == {"Record.unlocked": ["first", "second"]}
    assert recorder.several == {"Record.unlocked", "Record.locked"}


def test_two_locks_are_none():
    def write(record: Record, name: str) -> None:
        with record.lock if name == "first" else record.other:
            record.mixed += 1

    assert written_twice(write).races == {"Record.mixed": ["first", "second"]}


def test_one_writer_needs_no_lock():
    def write(record: Record, name: str) -> None:
        if name == "first":
            record.mine += 1
            record.mine += 1

    assert not written_twice(write).several


def test_who_waits_for_a_condition_holds_no_lock_meanwhile():
    with recording([]):
        condition = threading.Condition()
        with suppress(RuntimeError), condition:
            assert not condition.wait(0.01)
            assert isinstance(condition._lock, KnownRLock)  # pyright: ignore[reportAttributeAccessIssue]
