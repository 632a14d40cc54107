"""What several threads count is counted under a lock: `tests/mutants` takes these locks away."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from start_llm.core.events import Usage
from start_llm.telemetry.metrics import DiskMetrics, RequestMetrics, TranscriptMetrics
from tests.writers import recording

NOTES: dict[str, Callable[[Any], object]] = {
    "lost": DiskMetrics.note_lost,
    "errors": DiskMetrics.note_error,
    "queue": lambda disk: disk.note_queued(1),
    "in_flight": RequestMetrics.begin,
    "endings": lambda requests: requests.end("stop", Usage(prompt=1, cached=0, completion=1)),
    "bound": lambda transcripts: transcripts.note_binding(3, 2),
    "restored_reasoning": lambda transcripts: transcripts.note_restored_reasoning(1),
}


@pytest.mark.parametrize("name", NOTES)
def test_what_several_threads_note_is_noted_under_a_lock(name: str):
    kinds = [DiskMetrics, RequestMetrics, TranscriptMetrics]
    with recording(kinds) as recorder:
        (record,) = (made for kind in kinds if hasattr(made := kind(), name))
        recorder.begin()
        for writer in ("one", "other"):
            thread = threading.Thread(target=NOTES[name], args=(record,), name=writer)
            thread.start()
            thread.join()
    assert f"{type(record).__name__}.{name}" in recorder.several
    assert recorder.races == {}
