"""An engine whose prompt cache has a disk tier, and that can be stopped and started again."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream

from start_llm.cache.buffers import KVShape
from start_llm.cache.disk.disk_folder import DiskLimits
from start_llm.cache.disk.disk_restore import DiskRestorer
from start_llm.cache.disk.disk_tier import DiskAccess, DiskTier
from start_llm.engine.inbox import DiskNews
from start_llm.engine.resources import EngineResources
from start_llm.models.loader import load
from start_llm.storage.disk_thread import DiskThread
from start_llm.telemetry.metrics import DiskMetrics
from tests.cache.conversations import PLENTY, Cached, filled
from tests.conftest import TinyModel
from tests.engine.harness import uncached_resources


def settled(condition: Callable[[], object], seconds: float = 10) -> None:
    """Wait until it is so."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not so in time"
        time.sleep(0.002)


DAMAGED = "A file of the disk tier cannot be used"
DAMAGED_RECORD = "written.json of the disk tier is damaged"
ROOMY = DiskLimits(max_size=10**9)


def resources_of(tiny_model: TinyModel, family: str) -> EngineResources:
    model = load(tiny_model(family, hidden=128, layers=2))
    return uncached_resources(
        model.network, model.tokenizer.token_bytes, frozenset(), max_sequences=4, batches=True
    )


class OnDisk(Cached):
    """See `Cached`.

    Args:
        idle_s: seconds after which what nobody uses is written.
    """

    @property
    def restorer(self) -> DiskRestorer:
        assert self.cache.disk.restorer
        return self.cache.disk.restorer

    def __init__(
        self,
        resources: EngineResources,
        folder: Path,
        *,
        budget: int = PLENTY,
        limits: DiskLimits = ROOMY,
        idle_s: float = 30,
        is_in_place: bool = True,
        **changes: Any,
    ) -> None:
        self.reported: list[str] = []
        self.errors: list[Exception] = []
        self.disk = DiskMetrics()
        self.thread = DiskThread(self.errors.append)
        self.tier = DiskTier(folder, limits, self.thread, self.disk, self.reported.append)
        super().__init__(resources, budget, **changes)
        self.tier.traffic.notify = self.note_disk
        shape = KVShape.of(self.layers, filled(self.layers, resources.network))
        self.cache.attach_disk(DiskAccess(self.tier, shape, is_in_place, idle_s))
        self.thread.start()
        self.tier.start()

    def note_disk(self) -> None:
        self.inbox.put(DiskNews())

    def stop(self, *, flush_s: float = 20) -> None:
        with mx.stream(generation_stream):
            self.cache.disk.flush(flush_s)
        self.kill()

    def kill(self) -> None:
        """End without writing what is not written yet."""
        assert self.thread.close(10)
        self.tier.close()
        assert not self.errors
        is_damaged = any(reason != "missing" for reason in self.disk.rejected)
        reports = [line.partition(" (")[0] for line in self.reported if not line.startswith(DAMAGED_RECORD)]
        assert reports == [DAMAGED] * is_damaged


@contextmanager
def on_disk(resources: EngineResources, folder: Path, **options: Any) -> Generator[OnDisk]:
    engine = OnDisk(resources, folder, **options)
    try:
        yield engine
    finally:
        engine.stop()
