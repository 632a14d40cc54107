"""Keep the disk tier's folder within its quota."""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from start_llm.cache.disk.disk_index import TRANSCRIPTS, CachedFile, DiskIndex, FileName, ScannedFile, scan
from start_llm.core.thread_owners import DISK, owned_by

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet
    from pathlib import Path

    from start_llm.telemetry.metrics import DiskMetrics

_SLACK = 0.02
_SMALL_BYTES = 2**20
"""A folder without room for so much is full, if nothing smaller is in it."""


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """The limits of the disk tier.

    Attributes:
        max_size: bytes of the folder, or their share of the disk space that is free or taken by the folder.
        max_share: it takes no more of that space, so that the disk is never filled up.
        max_write_per_day: bytes; 0 is no limit.
        pause_s: seconds for which nothing is written after an error.
        refused_s: seconds for which a single file that cannot be written is not tried again.
        left_out_s: seconds for which a single file is left out that could not be read for want of something
            that may be there again soon, such as descriptors: longer than it takes to plan a prompt, and
            shorter than it takes a client to come back.
    """

    max_size: int | float
    max_share: float = 0.8
    max_write_per_day: int = 0
    pause_s: float = 30.0
    refused_s: float = 300.0
    left_out_s: float = 5.0


class Room(Enum):
    """Whether the folder has room for a file, or makes some."""

    FITS = auto()
    TOO_OLD = auto()
    """All that would have to go for it was used later, so it would be the next to go itself."""
    TOO_LARGE = auto()
    """It does not fit, though others may."""
    FULL = auto()
    """No file fits."""


class DiskFolder:
    """The files of one folder, those of others included.

    Attributes:
        path: of the folder.
        database_names: how the names of databases begin that have to stay; empty: all have to.
        kept_since_ns: if the folder is full, when its oldest file was used, in nanoseconds of wall time;
            else, or if nobody knows, 0. The disk thread writes it, and the engine thread reads it.
    """

    def __init__(self, path: Path, limits: DiskLimits, metrics: DiskMetrics) -> None:
        self.path = path
        self.limits = limits
        self.metrics = metrics
        self.index = DiskIndex()
        self.database_names: tuple[str, ...] = ()
        self.kept_since_ns = 0
        self._foreign_bytes = 0
        self._left: dict[FileName, int] = {}  # bytes of files that stay, though they are of no use now

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
            if self.index.entry(file.cached.name) is None:
                self.index.add(file.cached)
        elif not file.path.is_relative_to(self.path / TRANSCRIPTS):
            self._foreign_bytes += file.nbytes

    @owned_by(DISK)
    def keep_quota(self, being_read: AbstractSet[FileName]) -> int:
        """Remove the files that were not used for the longest time, until the others fit.

        Args:
            being_read: files that stay.

        Returns:
            The bytes that the folder may have.
        """
        self._count_others()
        index, limit = self.index, self.limit()
        self.metrics.max_bytes = limit
        if index.nbytes > limit:
            self._remove_databases()
            excess = index.nbytes - (1 - _SLACK) * limit
            self._evict(_oldest(self._removable(being_read), excess))
        return limit

    @owned_by(DISK)
    def make_room(self, file: CachedFile, being_read: AbstractSet[FileName]) -> Room:
        """Remove files that were used before a new one, and lost ones, until it fits; or none, if it does not
        even so. What it replaces does not count beside it.

        Args:
            being_read: files that stay.
        """
        limit = self.keep_quota(being_read)
        replaced = self.index.entry(file.name)
        added = file.nbytes - (replaced.nbytes if replaced else 0)
        if self.index.nbytes + added > limit:
            self._remove_databases()
        missing = self.index.nbytes + added - limit
        if missing <= 0:
            self.kept_since_ns = 0
            return Room.FITS
        removable = self._removable({*being_read, file.name})
        if (lacking := missing - _bytes_of(removable)) > 0:
            smallest = min((other.nbytes for other in removable), default=_SMALL_BYTES)
            return Room.TOO_LARGE if file.nbytes - lacking >= smallest else Room.FULL
        going = _oldest(removable, missing + _SLACK * limit, file.used_ns)
        if _bytes_of(going) < missing:
            self.kept_since_ns = removable[len(going)].used_ns
            return Room.TOO_OLD
        self._evict(going)
        return Room.FITS

    def _removable(self, being_read: AbstractSet[FileName]) -> list[CachedFile]:
        """Return the files that may go, in this order: lost ones, and then those that were not used for the
        longest time.
        """
        files = [file for file in self.index.oldest_first() if file.name not in being_read]
        return sorted(files, key=lambda file: not file.is_lost)

    def _evict(self, files: Sequence[CachedFile]) -> None:
        for file in files:
            self.remove(file)
            if file.name in self._left:
                self.index.add(file)  # it is as good as before
            else:
                self.metrics.evictions += 1

    def _count_others(self) -> None:
        left = (nbytes for name, nbytes in self._left.items() if self.index.entry(name) is None)
        databases = (database.nbytes for database in self._databases())
        self.index.other_bytes = self._foreign_bytes + sum(left) + sum(databases)

    def _remove_databases(self) -> None:
        """Remove what is known of conversations with models that were not used since the oldest file was.

        The newest rows of a database may be in its log alone, if a server was killed.
        """
        before_ns = next((file.used_ns for file in self.index.oldest_first()), time.time_ns())
        by_database: defaultdict[str, list[Path]] = defaultdict(list)
        for file in self._databases():
            by_database[file.path.stem].append(file.path)
        for name, paths in by_database.items():
            may_go = self.database_names and not name.startswith(self.database_names)
            if may_go and max(path.stat().st_mtime_ns for path in paths) < before_ns:
                for path in paths:
                    path.unlink(missing_ok=True)
        self._count_others()

    def _databases(self) -> list[ScannedFile]:
        return list(scan(self.path / TRANSCRIPTS))

    @owned_by(DISK)
    def leave_out(self, file: CachedFile, *, is_lost: bool) -> None:
        """Do not use a file for a while, or before the next start if it is lost. It still counts, and goes
        like others when room is needed; it may be written anew.
        """
        file.left_out_until = math.inf if is_lost else time.monotonic() + self.limits.left_out_s

    @owned_by(DISK)
    def remove(self, file: CachedFile) -> None:
        """Remove a file. One that stays although it is of no use still counts."""
        self.kept_since_ns = 0
        self.index.remove(file)
        try:
            file.path(self.path).unlink(missing_ok=True)
            self._left.pop(file.name, None)
        except OSError:
            self._left[file.name] = file.nbytes

    @owned_by(DISK)
    def write_times_of_use(self) -> None:
        """Give files that were used since the last call their times, by which the next start orders them."""
        for file in self.index.take_touched():
            with suppress(OSError):
                os.utime(file.path(self.path), ns=(file.used_ns, file.used_ns))

    @owned_by(DISK)
    def count(self) -> None:
        self.metrics.files, self.metrics.nbytes = len(self.index), self.index.nbytes


def _oldest(files: Sequence[CachedFile], nbytes: float, before_ns: float = math.inf) -> list[CachedFile]:
    """Return files from the beginning of a list that have so many bytes, or all that are lost or were used
    before.
    """
    chosen: list[CachedFile] = []
    for file in files:
        if nbytes <= 0 or (file.used_ns >= before_ns and not file.is_lost):
            break
        chosen.append(file)
        nbytes -= file.nbytes
    return chosen


def _bytes_of(files: Sequence[CachedFile]) -> int:
    return sum(file.nbytes for file in files)
