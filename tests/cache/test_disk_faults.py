"""Faults of a disk that say nothing of its files, and disks that are quicker or slower than expected."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from start_llm.cache.disk.disk_folder import DiskFolder, DiskLimits
from start_llm.cache.disk.disk_index import LOCK
from start_llm.cache.disk.disk_reads import DiskWait
from start_llm.cache.disk.disk_tier import DiskAccess
from start_llm.hosting.disk_storage import DiskStorage
from start_llm.storage.private_files import Lock
from start_llm.telemetry.metrics import DiskMetrics
from tests.cache.conversations import PAGE
from tests.cache.disk import OnDisk, on_disk, settled
from tests.cache.test_guards_of_disk import PROMPT, Held, cache_conversation, cached, files_in, resources
from tests.engine.harness import engine_request
from tests.flat_settings import settings_of


@pytest.mark.parametrize("has_state", [False, True], ids=["KV", "state"])
@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.EACCES])
@pytest.mark.sample(4)
def test_a_file_that_cannot_be_opened_for_now_stays(
    has_state: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cache_conversation(tmp_path, has_state=has_state)
    before, real = set(files_in(tmp_path)), os.open

    def failing(path: Any, *those: Any, **more: Any) -> int:
        if str(path).endswith(".safetensors"):
            raise OSError(code, os.strerror(code))
        return real(path, *those, **more)

    with on_disk(resources(has_state=has_state), tmp_path) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        monkeypatch.setattr(os, "open", failing)
        assert cached(engine.say((*PROMPT, 300, 301), 3)) == 0
        engine.cache.disk.flush(5)
        assert not engine.disk.rejected
        assert engine.disk.errors > 0
        monkeypatch.undo()
    assert before <= set(files_in(tmp_path))
    with on_disk(resources(has_state=has_state), tmp_path) as engine:
        assert cached(engine.say((*PROMPT, 300, 301), 3)) >= 301 // PAGE * PAGE


@pytest.mark.parametrize("cause", ["eviction", "idleness"])
def test_arrays_of_written_files_do_not_pile_up(cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The disk writes as fast as the engine hands over, all within one step of the engine."""
    kept: list[int] = []
    with on_disk(resources(), tmp_path, idle_s=0 if cause == "idleness" else 30) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        real = engine.tier.write

        def written_at_once(*those: Any) -> None:
            real(*those)
            settled(lambda: not engine.disk.queue)
            kept.append(len(engine.tier.traffic._written))

        monkeypatch.setattr(engine.tier, "write", written_at_once)
        engine.say(PROMPT, 3)
        if cause == "eviction":
            engine.cache.shrink(10**9)
        else:
            settled(lambda: engine.cache.disk.write_due(is_busy=False) or len(kept) >= 300 // PAGE)
        assert len(kept) >= 300 // PAGE
        assert max(kept) == 1


def test_a_disk_that_hangs_at_the_end_is_not_asked_again_and_keeps_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    storage = DiskStorage(settings_of(ssd_folder=str(tmp_path)), [].append)
    tier, thread, go = storage._tier, storage._thread, threading.Event()
    assert tier
    settled(lambda: tier.worker.scanned.is_over)
    ended: list[str] = []
    monkeypatch.setattr(tier.worker, "end", lambda: ended.append("end"))
    thread.submit(lambda: assert_set(go))
    storage.close(0.1)
    assert not ended, "it would hang as well"
    assert not Lock(tmp_path / LOCK).take(), "the disk thread may still write"
    go.set()
    storage.close(10)
    assert ended
    lock = Lock(tmp_path / LOCK)
    assert lock.take()
    lock.release()


@pytest.mark.long
def test_a_prompt_that_the_disk_cannot_help_does_not_wait_for_the_scan(tmp_path: Path):
    with on_disk(resources(), tmp_path) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        engine.tier.worker.scanned.is_over = False
        short = engine.say(PROMPT[:16], 3)
        assert cached(short) == 0
        watched = engine.submit(engine_request(PROMPT[100:117], 3))
        engine.step(3)
        assert engine.loop.schedule.restoring
        engine.tier.worker.scanned.is_over = True
        engine.finish(watched)


def asked(engine: OnDisk, prompt: tuple[int, ...]) -> DiskWait | None:
    request = engine_request(prompt, 3)
    return engine.cache.disk.wait_for(prompt, request.salt, 400, speed=1.0, may_look=False)


def test_who_follows_a_longer_read_and_leaves_says_nothing_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cache_conversation(tmp_path)
    with on_disk(resources(), tmp_path) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        held = Held(monkeypatch)
        engine.submit(engine_request((*PROMPT, 300, 301), 3))
        engine.step_until(lambda: engine.restorer._running)
        joined = asked(engine, (*PROMPT[:200], 7, 7))
        assert joined in engine.restorer._running[0].joined
        engine.cache.disk.leave(joined)
        assert (engine.disk.late, engine.reported) == (1, [])
        assert asked(engine, (*PROMPT[:200], 7, 7)), "the disk is still asked"
        held.go.set()


def test_a_disk_that_hangs_for_one_model_hangs_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cache_conversation(tmp_path)
    with on_disk(resources(), tmp_path) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        held, restorer = Held(monkeypatch), engine.restorer
        engine.submit(engine_request((*PROMPT, 300, 301), 3))
        engine.step_until(lambda: restorer._running)
        (restore,) = restorer._running
        restorer.leave(restore)
        engine.cache.attach_disk(DiskAccess(engine.tier, restorer._shape))  # as another model does
        assert asked(engine, (*PROMPT, 400)) is None
        (line,) = engine.reported
        assert "does not answer" in line
        held.go.set()
        settled(lambda: restore.read.is_over)
        assert asked(engine, (*PROMPT, 400))
        assert "answers again" in engine.reported[1]
        restorer.collect()
        engine.reported.clear()


def test_a_request_that_comes_while_pages_are_written_waits_for_few_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with on_disk(resources(), tmp_path) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        real, calls = engine.tier.write, [0]

        def slow(*those: Any) -> None:
            calls[0] += 1
            time.sleep(0.06)
            real(*those)
            settled(lambda: not engine.disk.queue)

        monkeypatch.setattr(engine.tier, "write", slow)
        engine.say(PROMPT, 3)
        assert engine.cache.disk.write_back
        engine.cache.disk.write_back._idle_s = 0
        engine.cache.disk.write_back.note_change()
        engine.cache.disk.write_due(is_busy=False)
        assert 1 <= calls[0] <= 2
        settled(lambda: engine.cache.disk.write_due(is_busy=False) or calls[0] >= 300 // PAGE)


def test_a_stop_during_the_scan_writes_once_it_is_over(tmp_path: Path):
    with on_disk(resources(), tmp_path) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        engine.say(PROMPT, 3)
        engine.tier.index.is_complete = False

        def completed() -> None:
            engine.tier.index.is_complete = True
            engine.tier.traffic.end(engine.tier.worker.scanned)

        engine.thread.submit(completed, after_s=0.3)
        engine.cache.disk.flush(10)
        settled(lambda: not engine.disk.queue)
        assert len(files_in(tmp_path)) >= 300 // PAGE


def test_a_file_whose_time_cannot_be_set_is_in_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def failing(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    with on_disk(resources(), tmp_path) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        engine.say(PROMPT, 3)
        monkeypatch.setattr(os, "utime", failing)
        engine.cache.disk.flush(10)
        settled(lambda: not engine.disk.queue)
        assert len(engine.tier.index) == len(files_in(tmp_path)) >= 300 // PAGE
        assert not engine.disk.errors


def test_a_clock_that_is_set_back_ends_no_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with on_disk(resources(), tmp_path, limits=DiskLimits(max_size=10**9, pause_s=0.1)) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        engine.tier.worker._pause("of a test")
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() - 86_400)
        time.sleep(0.2)
        assert not engine.tier.worker.pause_left_s
        engine.reported.clear()
        monkeypatch.undo()


def test_pages_that_another_one_computes_again_and_leaves_are_not_given_up(tmp_path: Path):
    """Without a state there, tokens that are known are computed again."""
    with on_disk(resources(has_state=True), tmp_path) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        engine.say(PROMPT, 3)
        watched = engine.submit(engine_request((*PROMPT[:150], 7, 7, 7), 50))
        engine.step(10)
        watched.generation.cancel()
        engine.step()
        (root,) = engine.cache._store.tree._roots.values()
        (first,) = root.children.values()
        assert first.uses == 2


def assert_set(event: threading.Event) -> None:
    assert event.wait(30)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (DiskLimits(max_size=0.5), "50% of what is free"),
        (DiskLimits(max_size=0.95), "80% of what is free"),
        (DiskLimits(max_size=10**18, max_share=0.1), "10% of what is free"),
        (DiskLimits(max_size=1000), "SSD_CACHE_MAX_SIZE is 1,000"),
    ],
)
def test_the_reason_of_a_full_folder_names_the_limit_that_holds(
    tmp_path: Path, limits: DiskLimits, reason: str
):
    metrics = DiskMetrics()
    folder = DiskFolder(tmp_path, limits, metrics)
    metrics.max_bytes = folder.limit()
    assert reason in folder.reason_of_limit()
