"""What a prompt waits for of the disk, and what it got of it."""

from __future__ import annotations

from typing import Any, cast

from start_llm.cache.disk.disk_reads import DiskRead, DiskWait
from start_llm.cache.disk.running_restore import DiskRestore, FromDisk
from start_llm.engine.disk_waits import DiskWaits
from start_llm.engine.generation import Generation
from start_llm.engine.schedule import QueuedRequest
from start_llm.telemetry.metrics import EngineMetrics
from tests.engine.harness import engine_request, standing_still

UNUSED = cast("Any", None)


def late_restore(got: FromDisk) -> DiskRestore:
    """Return a restore that was given up and is over."""
    return DiskRestore(
        wish=UNUSED,
        plan=UNUSED,
        seq_cache=UNUSED,
        buffers=UNUSED,
        read=DiskRead(),
        began=0.0,
        is_over=True,
        got=got,
    )


def test_what_the_disk_gave_counts_once_however_often_the_start_of_a_prompt_is_put_off():
    """It is asked for in each step in which it could share the pass of others."""
    got = FromDisk(100, 2.0)
    waits = DiskWaits(UNUSED, EngineMetrics(), standing_still)
    queued = QueuedRequest(Generation(engine_request(range(200))), due=0.0, wait=late_restore(got), waits=8)
    for _ in range(3):
        assert not waits.has_to_wait(queued, speed=100.0)
    assert queued.from_disk == got


class DiskThatAnswersMeanwhile:
    """Has a prompt's headers read first, which are there a moment later, and its pages then."""

    def __init__(self) -> None:
        self.waits: list[DiskWait] = []

    def wait_for(self, *_: Any, **__: Any) -> DiskWait:
        self.waits.append(DiskWait())
        return self.waits[-1]

    def clock(self) -> float:
        self.waits[0].is_over = True
        return 0.0


def test_a_look_at_the_disk_that_ends_meanwhile_is_followed_by_what_it_has_found():
    disk = DiskThatAnswersMeanwhile()
    waits = DiskWaits(cast("Any", disk), EngineMetrics(), disk.clock)
    queued = QueuedRequest(Generation(engine_request(range(200))), due=0.0)
    while not queued.is_restoring:
        assert waits.has_to_wait(queued, speed=100.0), "it would start without what the disk has"
    assert len(disk.waits) == 2
