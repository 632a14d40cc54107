"""What failed for a moment is tried again, and what is over is let go of."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generation_stream

from start_llm.cache.disk.disk_folder import DiskLimits
from start_llm.cache.disk.item_files import NewFile
from tests.cache.disk import OnDisk, on_disk, settled
from tests.cache.test_disk_trouble import FULL_PAGES, Copies, begun, fail, indescribable, reporting
from tests.cache.test_guards_of_disk import (
    PROMPT,
    STATE,
    Held,
    cache_conversation,
    cached,
    files_in,
    resources,
)
from tests.engine.harness import engine_request
from tests.engine.test_background import background

# ---------------------------------------------------------------------------------------------------- reading


def let_opening_fail(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """No file of the disk tier can be opened, whatever for."""
    real = os.open

    def failing(path: Any, *those: Any, **more: Any) -> int:
        if str(path).endswith(".safetensors"):
            raise OSError(code, os.strerror(code))
        return real(path, *those, **more)

    monkeypatch.setattr(os, "open", failing)


def let_pass(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + seconds)


@STATE
@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM, errno.ETIMEDOUT])
@pytest.mark.sample(2)
def test_a_moment_without_descriptors_costs_no_conversation(
    has_state: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cache_conversation(tmp_path, has_state=has_state)
    with on_disk(resources(has_state=has_state), tmp_path) as engine:
        begun(engine)
        with monkeypatch.context() as patch:
            let_opening_fail(patch, code)
            watched = engine.submit(engine_request((*PROMPT, 300, 301), 3))
            engine.step_until(lambda: engine.disk.errors)
            watched.generation.cancel()
            engine.step_until(lambda: not engine.is_busy)
        engine.cache.resize(1)
        engine.cache.resize(10**9)
        let_pass(monkeypatch, 60)
        assert cached(engine.say((*PROMPT, 300, 303), 3)) >= 290


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO])
def test_files_that_cannot_be_read_take_no_room_from_others(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cache_conversation(tmp_path)
    size = sum(path.stat().st_size for path in files_in(tmp_path))
    limits = DiskLimits(max_size=size + 10_000, left_out_s=300)
    with reporting(tmp_path, limits=limits) as engine:
        index, disk = engine.tier.index, engine.disk
        with monkeypatch.context() as patch:
            let_opening_fail(patch, code)
            look = engine.tier.look(index.oldest_first())
            settled(lambda: look.is_over)
        assert not any(index.get(*file.name) for file in index.oldest_first())
        assert (disk.files, disk.nbytes) == (len(files_in(tmp_path)), index.nbytes)
        engine.say(PROMPT, 5)
        engine.cache.disk.flush(5)
        settled(lambda: not disk.queue)
        written = disk.written_files
        assert written >= 9
        assert disk.evictions == 0, "a file takes the place of the one that cannot be read"
        engine.say(tuple(range(400, 700)), 3)
        engine.cache.disk.flush(5)
        settled(lambda: not disk.queue)
        assert disk.written_files >= written + 9
        assert (disk.state, engine.reported) == ("on", [])
        assert (disk.files, disk.nbytes) == (len(files_in(tmp_path)), index.nbytes)


# ---------------------------------------------------------------------------------------------------- writing


EITHER_THREAD = pytest.mark.parametrize(
    "failing", [fail, indescribable], ids=["engine thread", "disk thread"]
)


def once(failing: Callable[[NewFile], NewFile]) -> Callable[[NewFile], NewFile]:
    left = [1]

    def change(file: NewFile) -> NewFile:
        left[0] -= 1
        return failing(file) if left[0] >= 0 else file

    return change


class Idleness:
    """What an engine thread does while nothing comes in. Time stands still while it does something."""

    def __init__(self, engine: OnDisk, monkeypatch: pytest.MonkeyPatch) -> None:
        self._engine, self._now = engine, time.monotonic()
        assert engine.cache.disk.write_back
        monkeypatch.setattr(time, "monotonic", self.now)
        monkeypatch.setattr(engine.cache.disk.write_back, "_clock", self.now)

    def now(self) -> float:
        return self._now

    def until_a_rest_of(self, seconds: float, most: int = 100) -> float | None:
        """Go on until the thread would rest for longer than this, and return for how long; None: until
        something comes in.
        """
        for _ in range(most):
            with mx.stream(generation_stream):
                self._engine.loop.step()
            wait_for_disk(self._engine)
            rest_s = self._engine.loop.rest_s
            if rest_s is None or rest_s > seconds:
                return rest_s
            self._now += rest_s
        raise AssertionError("it has no rest")


def wait_for_disk(engine: OnDisk) -> None:
    """Wait until the disk thread has done what it has to do, and its news is there."""
    done = threading.Event()
    engine.thread.submit(done.set, may_wait=True)
    assert done.wait(30)


@EITHER_THREAD
def test_an_idle_server_tries_again_what_could_not_be_written_and_rests(
    failing: Callable[[NewFile], NewFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It may be killed before another request comes."""
    engine = begun(OnDisk(resources(), tmp_path, idle_s=0))
    copies = Copies(monkeypatch, once(failing))
    engine.say(PROMPT, 3)
    assert Idleness(engine, monkeypatch).until_a_rest_of(1000) is None
    assert copies.of_the_first == 2
    engine.reported.clear()
    engine.kill()
    with on_disk(resources(), tmp_path) as engine:
        assert cached(begun(engine).say((*PROMPT, 300, 301), 3)) >= 300


def test_what_can_never_be_written_keeps_no_idle_server_awake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with reporting(tmp_path, idle_s=0) as engine:
        copies = Copies(monkeypatch, fail)
        engine.say(PROMPT, 3)
        rest_s = Idleness(engine, monkeypatch).until_a_rest_of(100)
        assert rest_s
        assert 100 < rest_s <= 300
        assert (copies.of_the_first, len(files_in(tmp_path)) >= FULL_PAGES - 1) == (1, True)


@EITHER_THREAD
def test_what_could_not_be_written_is_tried_once_more_when_the_server_stops(
    failing: Callable[[NewFile], NewFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with reporting(tmp_path, idle_s=0) as engine:
        copies = Copies(monkeypatch, once(failing))
        engine.say(PROMPT, 3)
        settled(lambda: engine.cache.disk.write_due(is_busy=False) or copies.of_the_first)
        wait_for_disk(engine)
    assert copies.of_the_first == 2
    with on_disk(resources(), tmp_path) as engine:
        assert cached(begun(engine).say((*PROMPT, 300, 301), 3)) >= 300


# ---------------------------------------------------------------------------------------------- what is held


@STATE
def test_who_waits_behind_others_holds_nothing_of_what_was_restored_for_it(
    has_state: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The cache may drop it meanwhile, and then it has to be gone."""
    cache_conversation(tmp_path, has_state=has_state)
    used = replace(resources(has_state=has_state), max_sequences=2)
    with on_disk(used, tmp_path) as engine, without_collector():
        begun(engine)
        held = Held(monkeypatch)
        waiting = [engine.submit(background((*PROMPT, 300, number), 3)) for number in (301, 302)]
        engine.step_until(lambda: engine.restorer._running and engine.restorer._running[0].joined)
        refs = [weakref.ref(cache) for cache in engine.restorer._running[0].seq_cache.caches]
        others = [engine.submit(engine_request(range(start, start + 9), 200)) for start in (600, 700)]
        engine.step_until(lambda: all(watched.tokens for watched in others))
        held.go.set()
        engine.step_until(lambda: not engine.restorer._running)
        assert len(engine.loop.schedule) == 2
        engine.cache.resize(1)
        engine.step()
        assert [ref() for ref in refs] == [None] * len(refs)
        engine.cache.resize(10**9)
        engine.finish(*others, *waiting)
        assert all(watched.tokens for watched in waiting)


@contextmanager
def without_collector() -> Generator[None]:
    """What is let go of is freed because nothing refers to it, not because Python has looked for circles."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
