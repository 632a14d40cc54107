"""What failed for a moment is tried again, and what is over is let go of."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from start_llm.cache.disk.disk_folder import DiskLimits
from tests.cache.disk import on_disk, settled
from tests.cache.test_disk_trouble import begun, reporting
from tests.cache.test_guards_of_disk import PROMPT, STATE, cache_conversation, cached, files_in, resources
from tests.engine.harness import engine_request


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
            engine.step(5)
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
