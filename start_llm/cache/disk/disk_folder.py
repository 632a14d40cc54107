"""Keep the disk tier's folder within its quota."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from start_llm.cache.disk.disk_index import TRANSCRIPTS, CachedFile, DiskIndex, FileName, ScannedFile, scan
from start_llm.core.thread_owners import DISK, owned_by

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet
    from pathlib import Path

    from start_llm.telemetry.metrics import DiskMetrics

_SLACK = 0.02


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """The limits of the disk tier.

    Attributes:
        max_size: bytes of the folder, or their share of the disk space that is free or taken by the folder.
        max_share: it takes no more of that space, so that the disk is never filled up.
        max_write_per_day: bytes; 0 is no limit.
        pause_s: seconds for which nothing is written after an error.
    """

    max_size: int | float
    max_share: float = 0.8
    max_write_per_day: int = 0
    pause_s: float = 30.0


class DiskFolder:
    """The files of one folder, those of others included.

    Attributes:
        path: of the folder.
        database_names: how the names of databases begin that have to stay; empty: all have to.
    """

    def __init__(self, path: Path, limits: DiskLimits, metrics: DiskMetrics) -> None:
        self.path = path
        self.limits = limits
        self.metrics = metrics
        self.index = DiskIndex()
        self.database_names: tuple[str, ...] = ()
        self._foreign_bytes = 0

    def limit(self) -> int:
        """Return the bytes that the folder may have now. On any thread."""
        disk = os.statvfs(self.path)
        room = disk.f_bavail * disk.f_frsize + self.index.nbytes
        wanted = self.limits.max_size
        return int(min(wanted if isinstance(wanted, int) else wanted * room, self.limits.max_share * room))

    @owned_by(DISK)
    def reason_of_limit(self) -> str:
        """Say why the folder may have no more bytes."""
        limit = self.metrics.max_bytes
        if limit == self.limits.max_size:
            return f"SSD_CACHE_MAX_SIZE is {limit:,}"
        wanted = self.limits.max_size
        share = self.limits.max_share if isinstance(wanted, int) else min(wanted, self.limits.max_share)
        return f"its folder may have {limit:,}, {share:.0%} of what is free or its own"

    @owned_by(DISK)
    def add_scanned(self, file: ScannedFile) -> None:
        """Take a file of the scan into the index. What a process did not finish is removed."""
        if file.is_left_over:
            with suppress(OSError):
                file.path.unlink(missing_ok=True)
        elif file.cached:
            if self.index.get(*file.cached.name) is None:
                self.index.add(file.cached)
        elif not file.path.is_relative_to(self.path / TRANSCRIPTS):
            self._foreign_bytes += file.nbytes

    @owned_by(DISK)
    def keep_quota(self, coming_bytes: int, being_read: AbstractSet[FileName]) -> bool:
        """Remove the files that were not used for the longest time, until this many bytes fit.

        Args:
            being_read: files that stay.

        Returns:
            False if they do not fit even so.
        """
        self._count_databases()
        index, limit = self.index, self.limit()
        self.metrics.max_bytes = limit
        if index.nbytes + coming_bytes <= limit:
            return True
        oldest_first = index.oldest_first()
        self._remove_databases(before_ns=oldest_first[0].used_ns if oldest_first else time.time_ns())
        for file in oldest_first:
            if file.name in being_read:
                continue
            if index.nbytes + coming_bytes <= (1 - _SLACK) * limit:
                return True
            self.remove(file)
            self.metrics.evictions += 1
        return index.nbytes + coming_bytes <= limit

    def _count_databases(self) -> None:
        self.index.other_bytes = self._foreign_bytes + sum(database.nbytes for database in self._databases())

    def _remove_databases(self, before_ns: int) -> None:
        """Remove what is known of conversations with models that were not used since."""
        for database in self._databases():
            may_go = self.database_names and not database.path.name.startswith(self.database_names)
            if may_go and database.path.stat().st_mtime_ns < before_ns:
                database.path.unlink(missing_ok=True)
        self._count_databases()

    def _databases(self) -> list[ScannedFile]:
        return list(scan(self.path / TRANSCRIPTS))

    @owned_by(DISK)
    def remove(self, file: CachedFile) -> None:
        self.index.remove(file)
        with suppress(OSError):
            file.path(self.path).unlink(missing_ok=True)

    @owned_by(DISK)
    def write_times_of_use(self) -> None:
        """Give files that were used since the last call their times, by which the next start orders them."""
        for file in self.index.take_touched():
            with suppress(OSError):
                os.utime(file.path(self.path), ns=(file.used_ns, file.used_ns))

    @owned_by(DISK)
    def count(self) -> None:
        self.metrics.files, self.metrics.nbytes = len(self.index), self.index.nbytes
