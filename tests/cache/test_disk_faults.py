"""Faults of a disk that say nothing of its files, and what the tier does then."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tests.cache.conversations import PAGE
from tests.cache.disk import on_disk, settled
from tests.cache.test_guards_of_disk import PROMPT, cached, files_in, resources, said_before


@pytest.mark.parametrize("has_state", [False, True], ids=["KV", "state"])
@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE])
def test_a_file_that_cannot_be_opened_for_now_stays(
    has_state: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    said_before(tmp_path, has_state=has_state)
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
