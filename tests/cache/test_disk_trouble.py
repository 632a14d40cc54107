"""What goes wrong with one file, one restore or one request concerns no other, and ends."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from start_llm.cache.buffers import Outgoing
from start_llm.cache.disk import disk_worker
from start_llm.cache.disk.disk_folder import DiskLimits
from start_llm.cache.disk.disk_reads import DiskRead, DiskWait, FilePart
from start_llm.cache.disk.item_files import ItemFiles, NewFile
from start_llm.cache.disk.page_file import FileHeader, TensorLayout
from start_llm.cache.pages import CacheItem, Page
from tests.cache.conversations import PAGE
from tests.cache.disk import OnDisk, on_disk, settled
from tests.cache.test_disk_faults import asked
from tests.cache.test_guards_of_disk import (
    PROMPT,
    Held,
    cache_conversation,
    cached,
    files,
    files_in,
    resources,
)
from tests.engine.harness import engine_request, uncached_resources
from tests.engine.test_guards import Counting, check

FULL_PAGES = 300 // PAGE
PAUSES = "The disk tier of the prompt cache pauses"


def begun(engine: OnDisk) -> OnDisk:
    """An engine whose disk tier has scanned its folder."""
    settled(lambda: engine.tier.worker.scanned.is_over)
    return engine


@contextmanager
def reporting(folder: Path, **options: Any) -> Generator[OnDisk]:
    """An engine whose disk has something to report; the test reads it."""
    engine = begun(OnDisk(resources(), folder, **options))
    try:
        yield engine
    finally:
        engine.reported.clear()
        engine.errors.clear()
        engine.stop()


@contextmanager
def busy(engine: OnDisk) -> Generator[None]:
    """The disk thread does nothing meanwhile."""
    go = threading.Event()
    engine.thread.submit(lambda: assert_set(go), is_urgent=True)
    try:
        yield
    finally:
        go.set()


def assert_set(event: threading.Event) -> None:
    assert event.wait(30)


def write(engine: OnDisk, number: int, nbytes: int = 8, numbers: Any = ()) -> None:
    """Queue a file of its own."""
    header = FileHeader(
        "pages", bytes([number] * 16), bytes(16), (1,), {"x": TensorLayout("U8", (nbytes,))}, numbers
    )
    engine.tier.write(
        header, Outgoing(dict(header.tensors), [memoryview(bytearray(nbytes))]), 0, lambda *_: []
    )


# --------------------------------------------------------------------------------------- files and their data


class WithoutValues(Counting):
    """Keeps values of width 0, as `minimax_m3_vl` does for the keys of its index."""

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        kept = mx.broadcast_to(tokens[:, None, :, None].astype(mx.float32), (*tokens[:, None].shape, 32))
        cache[0].update_and_fetch(kept, kept[..., :0])
        return 100 * mx.eye(1500)[(tokens + 1) % 1500]


@pytest.mark.parametrize("is_in_place", [True, False], ids=["in place", "staged"])
def test_arrays_of_width_0_come_back(is_in_place: bool, tmp_path: Path):
    used = uncached_resources(
        WithoutValues(has_state=False), lambda _: b"a", frozenset(), max_sequences=4, batches=False
    )
    with on_disk(used, tmp_path) as engine:
        engine.say(PROMPT, 5)
    with on_disk(used, tmp_path, is_in_place=is_in_place) as engine:
        assert cached(engine.say((*PROMPT, 300, 301), 3)) >= 300
        assert not engine.disk.rejected
        check(engine)


def fail(*_: Any) -> Any:
    raise ValueError("broken on purpose")


def test_an_error_of_our_own_removes_no_file(tmp_path: Path):
    cache_conversation(tmp_path)
    before = files_in(tmp_path)
    with reporting(tmp_path) as engine:
        file = engine.tier.index.oldest_first()[0]
        look = engine.tier.look([file])
        settled(lambda: look.is_over)
        assert file.header
        layouts = tuple(file.header.tensors.values())
        read = DiskRead(parts=[FilePart(file, file.parent, file.header.tokens, layouts, fail)])
        engine.tier.read(read)
        settled(lambda: read.is_over)
        assert (read.done, engine.disk.rejected) == (0, {})
        settled(lambda: engine.errors)
        assert files_in(tmp_path) == before


@pytest.mark.parametrize("code", [errno.EIO, errno.ETIMEDOUT])
def test_a_device_that_fails_for_now_costs_no_file(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cache_conversation(tmp_path)
    before = set(files_in(tmp_path))

    def failing(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    with on_disk(resources(), tmp_path) as engine:
        begun(engine)
        monkeypatch.setattr(os, "preadv", failing)
        assert cached(engine.say((*PROMPT, 300, 301), 3)) == 0
        assert (engine.disk.rejected, engine.disk.errors > 0) == ({}, True)
        engine.cache.disk.flush(5)
        before_the_next = engine.disk.errors
        engine.cache.disk.flush(5)
        assert engine.disk.errors == before_the_next, "it is not read again and again"
        monkeypatch.undo()
    assert before <= set(files_in(tmp_path))


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE])
@pytest.mark.parametrize("has_state", [False, True])
def test_a_file_that_cannot_be_read_is_asked_for_once_and_written_anew(
    has_state: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cache_conversation(tmp_path, has_state=has_state)
    bad = files(tmp_path)[4]
    real, opened = os.open, [0]

    def failing(path: Any, *those: Any, **more: Any) -> int:
        if str(path) != str(bad):
            return real(path, *those, **more)
        opened[0] += 1
        raise OSError(code, os.strerror(code))

    limits = DiskLimits(max_size=10**9, left_out_s=300)
    with on_disk(resources(has_state=has_state), tmp_path, limits=limits) as engine:
        begun(engine)
        monkeypatch.setattr(os, "open", failing)
        engine.say((*PROMPT, 300, 301), 3, boundaries=(290,))
        assert opened == [1]
        monkeypatch.undo()
        engine.cache.disk.flush(5)
        engine.cache.resize(1)
        engine.cache.resize(10**9)
        assert cached(engine.say((*PROMPT, 300, 302), 3, boundaries=(290,))) >= 290


# ---------------------------------------------------------------------------------------------------- writing


def test_a_file_that_cannot_be_described_is_not_queued_for_ever(tmp_path: Path):
    with reporting(tmp_path) as engine:
        write(engine, 1, numbers=((object(),),))
        settled(lambda: not engine.disk.queue, 2)
        assert not engine.tier.has(("pages", bytes([1] * 16)))
        assert not engine.tier.traffic.is_full


class Copies:
    """Counts the copies of each page, and changes those of the first one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, change: Callable[[NewFile], NewFile]) -> None:
        self.of_the_first = 0
        real = ItemFiles.new

        def new(files: ItemFiles, item: CacheItem) -> NewFile:
            is_first = isinstance(item, Page) and item.start == 0
            self.of_the_first += is_first
            return change(real(files, item)) if is_first else real(files, item)

        monkeypatch.setattr(ItemFiles, "new", new)


def oversized(file: NewFile) -> NewFile:
    header, content = file
    content.contents.append(memoryview(bytearray(4 * 10**6)))
    content.tensors["more"] = TensorLayout("U8", (4 * 10**6,))
    return NewFile(header, content)


def indescribable(file: NewFile) -> NewFile:
    object.__setattr__(file.header, "numbers", ((object(),),))
    return file


@pytest.mark.parametrize("change", [oversized, indescribable, fail])
def test_one_that_cannot_be_written_keeps_no_other_from_it_when_the_server_stops(
    change: Callable[[NewFile], NewFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with reporting(tmp_path, limits=DiskLimits(max_size=3 * 10**6)) as engine:
        copies = Copies(monkeypatch, change)
        engine.say(PROMPT, 3)
        engine.cache.disk.flush(10)
        settled(lambda: not engine.disk.queue)
        assert len(files_in(tmp_path)) >= FULL_PAGES
        assert (copies.of_the_first, engine.disk.state) == (1, "on")
        (line,) = engine.reported
        assert "cannot be written" in line


def test_what_is_evicted_and_cannot_be_copied_goes_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with reporting(tmp_path) as engine:
        monkeypatch.setattr(ItemFiles, "new", fail)
        engine.say(PROMPT, 3)
        engine.cache.resize(1)
        assert engine.cached.evictions > 0
        assert engine.say(PROMPT, 3).tokens
        assert engine.metrics.failures == 0
        assert "cannot be written" in engine.reported[0]


@pytest.mark.parametrize("change", [oversized, indescribable, fail])
def test_one_that_cannot_be_written_is_tried_once(
    change: Callable[[NewFile], NewFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with reporting(tmp_path, limits=DiskLimits(max_size=3 * 10**6), idle_s=0) as engine:
        copies = Copies(monkeypatch, change)
        engine.say(PROMPT, 3)
        write_back = engine.cache.disk.write_back
        assert write_back
        for _ in range(4):
            write_back.note_change()
            engine.cache.disk.write_due(is_busy=False)
            settled(lambda: not engine.disk.queue)
        settled(lambda: engine.cache.disk.write_due(is_busy=False) or len(files_in(tmp_path)) >= FULL_PAGES)
        assert (copies.of_the_first, engine.disk.state, engine.metrics.failures) == (1, "on", 0)


def test_one_that_could_not_be_written_is_tried_again_when_time_has_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Memory may have been short for a moment. Without its first page nothing of a prompt is found."""
    left = [1]

    def fails_once(file: NewFile) -> NewFile:
        left[0] -= 1
        return fail() if left[0] >= 0 else file

    limits = DiskLimits(max_size=10**9, refused_s=0.2)
    with reporting(tmp_path, limits=limits, idle_s=0) as engine:
        copies = Copies(monkeypatch, fails_once)
        engine.say(PROMPT, 3)
        settled(lambda: engine.cache.disk.write_due(is_busy=False) or copies.of_the_first == 1)
        time.sleep(0.3)
        settled(lambda: engine.cache.disk.write_due(is_busy=False) or copies.of_the_first == 2)
        settled(lambda: not engine.disk.queue)
    with on_disk(resources(), tmp_path) as engine:
        assert cached(begun(engine).say((*PROMPT, 300, 301), 3)) >= 300


def test_a_file_for_which_there_was_no_room_is_taken_once_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    room = SimpleNamespace(f_bavail=5 * 2**20 // 4096, f_frsize=4096)
    with reporting(tmp_path, limits=DiskLimits(max_size=10**9, refused_s=0.2)) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(os, "statvfs", lambda _: room)
            write(engine, 1, nbytes=8 * 2**20)
            settled(lambda: not engine.disk.queue)
        name = ("pages", bytes([1] * 16))
        assert not engine.tier.has(name)
        assert engine.tier.traffic.is_refused(name)
        settled(lambda: not engine.tier.traffic.is_refused(name), 2)


def test_a_file_that_was_queued_before_the_disk_was_full_ends_no_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real, left = disk_worker.write_file, [1]

    def full_once(*those: Any) -> int:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*those)

    monkeypatch.setattr(disk_worker, "write_file", full_once)
    with reporting(tmp_path) as engine:
        with busy(engine):
            write(engine, 1)
            write(engine, 2)
        settled(lambda: not engine.disk.queue)
        assert engine.tier.worker.pause_left_s
        assert engine.disk.state == "paused"
        assert [line.partition(":")[0] for line in engine.reported] == [PAUSES]


def test_a_pause_ends_although_nothing_is_left_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with reporting(tmp_path, limits=DiskLimits(max_size=10**9, pause_s=0.05)) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(disk_worker, "write_file", lambda *_: os.close(10**6))
            write(engine, 1)
            settled(lambda: not engine.disk.queue)
        assert engine.disk.state == "paused"
        settled(lambda: engine.disk.state == "on", 2)


def test_what_is_to_be_written_goes_before_what_is_to_be_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cache_conversation(tmp_path)
    with on_disk(resources(), tmp_path) as engine:
        begun(engine)
        done: list[str] = []
        worker = engine.tier.worker
        real_write, real_verify = worker.write, worker.verify
        monkeypatch.setattr(worker, "write", lambda *those: (done.append("write"), real_write(*those)))
        monkeypatch.setattr(worker, "verify", lambda *those: (done.append("check"), real_verify(*those)))
        with busy(engine):
            engine.tier.verify_later(engine.tier.index.oldest_first()[:2])
            write(engine, 1)
        assert engine.tier.traffic.wait_for_checks(10)
        assert done == ["write", "check", "check"]


def test_a_scan_that_fails_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk_worker, "scan", lambda _: (fail() for _ in range(1)))
    engine = OnDisk(resources(), tmp_path)
    settled(lambda: engine.tier.index.is_complete, 2)
    assert engine.tier.worker.scanned.is_over
    engine.reported.clear()
    engine.errors.clear()
    engine.stop()


# ---------------------------------------------------------------------------------------------------- reading


def test_a_restore_ends_when_the_last_of_those_that_wait_for_it_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cache_conversation(tmp_path)
    with on_disk(resources(), tmp_path) as engine:
        begun(engine)
        held = Held(monkeypatch)
        first = engine.submit(engine_request((*PROMPT, 300, 301), 3))
        engine.step_until(lambda: engine.restorer._running)
        (restore,) = engine.restorer._running
        second = engine.submit(engine_request((*PROMPT, 300, 7), 3))
        engine.step_until(lambda: restore.joined)
        first.generation.cancel()
        engine.step()
        assert not restore.read.is_given_up, "another one waits for it"
        second.generation.cancel()
        engine.step()
        assert restore.read.is_given_up
        held.go.set()


def test_who_waits_longer_gets_what_another_one_has_begun_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cache_conversation(tmp_path)
    with on_disk(resources(), tmp_path, clock=(held := Held(monkeypatch)).clock) as engine:
        begun(engine)
        first = engine.submit(engine_request((*PROMPT, 300, 301), 3))
        engine.step_until(lambda: engine.restorer._running)
        (restore,) = engine.restorer._running
        held.now += 4
        second = engine.submit(engine_request((*PROMPT, 300, 7), 3))
        engine.step_until(lambda: restore.joined)
        for _ in range(2):
            held.now += 1.1
            engine.note_disk()
            engine.step()
        engine.finish(first)
        assert (cached(first), engine.disk.late, engine.reported) == (0, 1, [])
        held.go.set()
        engine.finish(second)
        assert (restore.read.done, engine.disk.restored_tokens) == (len(restore.plan.files), 301)
        assert not restore.joined, "a circle of references would hold the caches longer than the cache does"


def test_one_restore_that_fails_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    prompts = [tuple(range(start, start + 90)) for start in (0, 400)]
    with on_disk(resources(), tmp_path) as engine:
        for prompt in prompts:
            engine.say(prompt, 3)
    with on_disk(resources(), tmp_path) as engine:
        begun(engine)
        waits: list[DiskWait | None] = []
        for prompt in prompts:
            while not isinstance(restore := asked(engine, (*prompt, 1)), DiskWait) or not restore.saves:
                time.sleep(0.001)
            waits.append(restore)
        restorer = engine.restorer
        settled(lambda: all(restore.read.is_over for restore in restorer._running))
        real, calls = restorer.complete, [0]

        def fails_once(*those: Any) -> None:
            calls[0] += 1
            if calls[0] == 1:
                raise RuntimeError("broken on purpose")
            real(*those)

        monkeypatch.setattr(restorer, "complete", fails_once)
        with pytest.raises(RuntimeError, match="on purpose"):
            restorer.collect()
        assert (calls[0], restorer._running) == (2, [])
        assert engine.disk.hits == 1
