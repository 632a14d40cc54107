"""The disk tier: writes files, reads them, and keeps their folder within its quota, all on the disk thread.

    start       lock the folder, begin the scan
    write       queue a file; `can_take` says whether there is room in the queue
    read, look  read files for a prompt that waits for them

A file that cannot be used is removed and counted. If the disk is full or cannot be written, the tier steps
back: it writes nothing for a while, and goes on when it can.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from start_llm.cache.disk_index import (
    LOCK,
    TRANSCRIPTS,
    WRITTEN,
    CachedFile,
    DiskIndex,
    FileName,
    ScannedFile,
    scan,
)
from start_llm.cache.disk_reads import DiskRead, DiskWait, FilePart
from start_llm.cache.page_file import FileHeader, HurtFile, OpenedFile, opened_file, write_file
from start_llm.cache.write_limit import DailyWriteLimit
from start_llm.core.disk_thread import DiskThread
from start_llm.core.private_files import Lock, private_folder
from start_llm.telemetry.metrics import DiskMetrics

if TYPE_CHECKING:
    from start_llm.cache.buffers import KVShape, Outgoing

MOST_IN_FLIGHT = 3
"""Files that may wait for the disk at once. Their arrays take memory."""
_WRITTEN_S = 5.0
_DAY_CHECK_S = 60.0
_UTIME_S = 10.0
_SCAN_SLICE_S = 0.2
_MOST_SCAN_WAIT_S = 5.0
"""For which prompts wait for the scan; after that the files that it has not found yet are missed."""
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


type Reader = Callable[[CachedFile], FileHeader | None]
"""Returns what a file says of itself; None if it cannot be used. On the disk thread."""


type Superseded = Callable[[DiskIndex, Reader], list[CachedFile]]
"""Returns the files that are worth nothing beside a new one."""


class DiskTier:
    """The files of one folder.

    Args:
        say: told, in a sentence, when the tier steps back and when it goes on.

    Attributes:
        notify: called on the disk thread when something that may be waited for is over.
        database_names: how the names of databases begin that have to stay; empty: all have to.
    """

    def __init__(
        self,
        folder: Path,
        limits: DiskLimits,
        thread: DiskThread,
        metrics: DiskMetrics,
        say: Callable[[str], None],
    ) -> None:
        self.folder = folder
        self.index = DiskIndex()
        self.notify: Callable[[], None] = lambda: None
        self.database_names: tuple[str, ...] = ()
        self.metrics = metrics
        self._limits = limits
        self._thread = thread
        self._say = say
        self._lock = Lock(folder / LOCK)
        self._queued: set[FileName] = set()
        self._unverified: set[FileName] = set()
        self._written: deque[Outgoing] = deque()
        self._room = threading.Condition()
        self._paused_until = 0.0
        self._will_write_used = self._will_save_written = False
        self._foreign_bytes = 0
        self._reads: set[DiskRead] = set()
        self._is_on = self._is_silent = self._has_told_hurt = False
        self._written_today = DailyWriteLimit(folder / WRITTEN, limits.max_write_per_day)
        self._scanned = DiskWait()

    # ---------------------------------------------------------------------------------------- start and stop

    def start(self) -> bool:
        """Lock the folder and begin to scan it.

        Returns False if another server has it, or it cannot be used. The tier then stays off.
        """
        try:
            private_folder(self.folder)
            is_ours = self._lock.take()
        except OSError as error:
            return self._stays_off(f"the folder cannot be used: {error}")
        if not is_ours:
            return self._stays_off(f"process {self._lock.holder()} uses the folder")
        self._is_on = True
        self.metrics.state = "scanning"
        if not self._written_today.load():
            self._say(
                f"{WRITTEN} of the disk tier is damaged: what was written earlier today is not counted."
            )
        self._thread.submit(lambda: self._scan(scan(self.folder), time.perf_counter()), is_urgent=True)
        return True

    def _stays_off(self, reason: str) -> bool:
        self.metrics.state = f"off: {reason}"
        self._say(f"The disk tier of the prompt cache stays off: {reason}.")
        return False

    def close(self) -> None:
        """Let the folder go. Call it when the disk thread has ended."""
        if self._is_on:
            self._is_on = False
            self._write_used()
            self._written_today.save()
            self._lock.release()

    def _scan(self, found: Iterator[ScannedFile], began: float) -> None:
        """Add some of the files that are found. The rest comes behind what somebody waits for."""
        pause = time.perf_counter() + _SCAN_SLICE_S
        try:
            for file in found:
                self._add_found(file)
                if time.perf_counter() > pause:
                    self._scan_later(found, began)
                    return
            self.index.is_complete = True
            self.metrics.state = "on"
            self._keep_quota(0)
        except OSError as error:
            self.index.is_complete = True
            self._step_back(error)
        self.metrics.scan_s = time.perf_counter() - began
        self._count()
        self._end(self._scanned)

    def _scan_later(self, found: Iterator[ScannedFile], began: float) -> None:
        if not self._scanned.is_over and time.perf_counter() - began > _MOST_SCAN_WAIT_S:
            self._end(self._scanned)
        self._thread.submit(lambda: self._scan(found, began), is_urgent=not self._scanned.is_over)

    def _add_found(self, found: ScannedFile) -> None:
        if found.is_left_over:
            with suppress(OSError):
                found.path.unlink(missing_ok=True)
        elif found.cached:
            if self.index.get(*found.cached.name) is None:
                self.index.add(found.cached)
        elif not found.path.is_relative_to(self.folder / TRANSCRIPTS):
            self._foreign_bytes += found.nbytes

    # ------------------------------------------------------------------------------------------------- write

    @property
    def is_on(self) -> bool:
        return self._is_on

    @property
    def is_full(self) -> bool:
        """True if as many files wait for the disk as may."""
        return len(self._queued) >= MOST_IN_FLIGHT

    @property
    def pause_left_s(self) -> float:
        """Seconds for which nothing is written, because there was an error, or enough was written today."""
        pause = max(self._paused_until - time.time(), 0)
        return max(pause, _DAY_CHECK_S) if self._written_today.is_reached else pause

    @property
    def can_take(self) -> bool:
        """True if a file can be queued now."""
        return self._is_on and self.index.is_complete and not self.is_full and not self.pause_left_s

    def has(self, name: FileName) -> bool:
        """Return whether a file is there or queued."""
        return name in self._queued or self.index.get(*name) is not None

    def wait_for_room(self, timeout_s: float) -> bool:
        """Wait until a file can be queued. False if none can be in this time."""
        with self._room:
            self._room.wait_for(lambda: not self.is_full, timeout_s)
        return self.can_take

    def write(
        self,
        header: FileHeader,
        content: Outgoing,
        used_ns: int,
        superseded: Superseded,
    ) -> None:
        """Queue a file.

        Args:
            content: its tensors. `release_written` lets go of them.
            used_ns: when it was used last, in nanoseconds of wall time.
            superseded: returns the files that are worth nothing beside it. Called on the disk thread.
        """
        name = header.kind, header.key
        with self._room:
            self._queued.add(name)
        self.metrics.note_queued(1)
        if not self._thread.submit(lambda: self._write(header, content, used_ns, superseded)):
            self._is_written(name)

    def release_written(self) -> None:
        """Let go of the arrays of written files. On the engine thread, because it frees memory of MLX."""
        while self._written:
            self._written.popleft().contents.clear()

    def _write(
        self,
        header: FileHeader,
        content: Outgoing,
        used_ns: int,
        superseded: Superseded,
    ) -> None:
        file = CachedFile(
            header.kind, header.key, header.parent, header.nbytes, used_ns, header, is_verified=True
        )
        try:
            if self._keep_quota(file.nbytes):
                path = file.path(self.folder)
                write_file(path, header, content.contents)
                os.utime(path, ns=(used_ns, used_ns))
                self.index.add(file)
                self._note_written(file.nbytes)
                being_read = self._being_read
                for one in superseded(self.index, self._header_of):
                    if one.name not in being_read:
                        self._remove(one)
                self._goes_on()
            else:
                self.metrics.note_lost()
                self._pause(f"there is no room for {file.nbytes:,} bytes; {self._reason_of_limit()}")
        except OSError as error:
            self._step_back(error)
        finally:
            self._written.append(content)
            self._count()
            self._is_written(file.name)

    def _is_written(self, name: FileName) -> None:
        with self._room:
            self._queued.discard(name)
            self._room.notify_all()
        self.metrics.note_queued(-1)
        self.notify()

    def note_late(self) -> None:
        """Count a prompt that did not wait any longer, and say that the disk does not answer."""
        self.metrics.late += 1
        if not self._is_silent:
            self._is_silent = True
            self._say("The disk tier of the prompt cache does not answer. Prompts are computed meanwhile.")

    def note_answer(self) -> None:
        """Say that the disk answers again."""
        if self._is_silent:
            self._is_silent = False
            self._say("The disk tier of the prompt cache answers again.")

    def _step_back(self, error: OSError) -> None:
        self.metrics.note_error()
        self._pause(str(error))

    def _pause(self, reason: str) -> None:
        """Write nothing for a while, and say so once until something could be written again."""
        self._paused_until = time.time() + self._limits.pause_s
        if self.metrics.state != "paused":
            self.metrics.state = "paused"
            self._say(f"The disk tier of the prompt cache pauses: {reason}.")

    def _goes_on(self) -> None:
        if self.metrics.state == "paused":
            self.metrics.state = "on"
            self._say("The disk tier of the prompt cache goes on.")

    # -------------------------------------------------------------------------------------------------- read

    @property
    def scanned(self) -> DiskWait:
        """Over once the index is complete."""
        return self._scanned

    def read(self, job: DiskRead) -> None:
        """Read files for a prompt. Several prompts take turns, file by file."""
        self._reads.add(job)
        if not self._read_on(job):
            self._end(job)

    def _read(self, job: DiskRead) -> None:
        has_more = False
        try:
            if job.is_given_up:
                pass
            elif self._read_part(job.parts[job.done]):
                job.done += 1
                has_more = job.done < len(job.parts) and (job.pauses() or self._read_on(job))
                if has_more and job.most_ahead is not None:
                    self.notify()
        finally:
            if not has_more:
                self._end(job)

    def take(self, job: DiskRead, parts: int) -> None:
        """Note that the first `parts` files of a job are where they belong: their buffers are free again."""
        if job.take(parts) and not self._read_on(job):
            self._end(job)

    def _read_on(self, job: DiskRead) -> bool:
        return self._thread.submit(lambda: self._read(job), is_urgent=True)

    def _read_part(self, part: FilePart) -> bool:
        def read(opened: OpenedFile) -> None:
            header = opened.header
            if header.parent != part.parent or header.tokens != part.tokens:
                raise HurtFile("tokens")
            if tuple(header.tensors.values()) != part.tensors:
                raise HurtFile("layout")
            opened.read_into(part.targets())

        part.file.is_verified = self._is_right(part.file, read)
        return part.file.is_verified

    def verify_later(self, files: Iterable[CachedFile]) -> None:
        """Check files whose content was computed: a hurt one would otherwise not be written again."""
        for file in files:
            if not file.is_verified and file.name not in self._unverified:
                self._unverified.add(file.name)
                if not self._thread.submit(partial(self._verify, file)):
                    self._is_checked(file)

    def wait_for_checks(self, timeout_s: float) -> bool:
        """Wait until all files that `verify_later` was told of are checked. False if they are not in time."""
        with self._room:
            return self._room.wait_for(lambda: not self._unverified, timeout_s)

    def _verify(self, file: CachedFile) -> None:
        try:
            if self.index.get(*file.name) is file and not file.is_verified:
                file.is_verified = self._is_right(file, OpenedFile.verify)
        finally:
            self._is_checked(file)

    def _is_checked(self, file: CachedFile) -> None:
        with self._room:
            self._unverified.discard(file.name)
            self._room.notify_all()

    def look(self, files: list[CachedFile]) -> DiskWait:
        """Read the headers of files that are known by name alone."""
        wait = DiskWait()

        def look() -> None:
            try:
                for file in files:
                    self._header_of(file)
            finally:
                self._end(wait)

        if not self._thread.submit(look, is_urgent=True):
            self._end(wait)
        return wait

    def _header_of(self, file: CachedFile) -> FileHeader | None:
        if file.header is None:
            self._is_right(file, partial(self._learn, file))
        return file.header

    def _learn(self, file: CachedFile, opened: OpenedFile) -> None:
        if opened.header.parent != file.parent:
            raise HurtFile("key")
        file.header = opened.header

    def _is_right(self, file: CachedFile, use: Callable[[OpenedFile], None]) -> bool:
        """Open a file and use it. A file that is hurt is removed and counted."""
        try:
            with opened_file(file.path(self.folder), *file.name) as opened:
                use(opened)
        except HurtFile as error:
            self._reject(file, error.reason)
        except (ValueError, TypeError):  # what it says of itself makes no sense
            self._reject(file, "header")
        except OSError:
            self._reject(file, "unreadable")
        else:
            return True
        return False

    def _reject(self, file: CachedFile, reason: str) -> None:
        self.metrics.rejected[reason] += 1
        if reason != "missing" and not self._has_told_hurt:
            self._has_told_hurt = True
            self._say(
                f"A file of the disk tier cannot be used ({reason}) and is removed: what it held is computed "
                "anew. Others like it are counted under rejected_files of /stats."
            )
        self._remove(file)
        self._count()

    def _end(self, wait: DiskWait) -> None:
        if isinstance(wait, DiskRead):
            self._reads.discard(wait)
        wait.is_over = True
        self.notify()

    # ------------------------------------------------------------------------------------------------- quota

    def touch(self, files: list[CachedFile]) -> None:
        """Record that these files, in the order of their tokens, are in use."""
        self.index.touch(files, self._now_ns())
        if not self._will_write_used:
            self._will_write_used = self._thread.submit(self._write_used, after_s=_UTIME_S)

    def _write_used(self) -> None:
        self._will_write_used = False
        for file in self.index.take_touched():
            with suppress(OSError):
                os.utime(file.path(self.folder), ns=(file.used_ns, file.used_ns))

    def _keep_quota(self, coming_bytes: int) -> bool:
        """Remove the files that were not used for the longest time, until this many bytes fit.

        Returns False if they do not fit even so.
        """
        self._count_databases()
        limit = self.limit()
        self.metrics.max_bytes = limit
        if self.index.nbytes + coming_bytes <= limit:
            return True
        oldest_first, being_read = self.index.oldest_first(), self._being_read
        self._remove_databases(before_ns=oldest_first[0].used_ns if oldest_first else self._now_ns())
        for file in oldest_first:
            if file.name in being_read:
                continue
            if self.index.nbytes + coming_bytes <= (1 - _SLACK) * limit:
                return True
            self._remove(file)
            self.metrics.evictions += 1
        return self.index.nbytes + coming_bytes <= limit

    @property
    def _being_read(self) -> set[FileName]:
        """The files that prompts wait for."""
        return {part.file.name for job in list(self._reads) for part in job.parts}

    def _count_databases(self) -> None:
        self.index.other_bytes = self._foreign_bytes + sum(one.nbytes for one in self._databases())

    def _remove_databases(self, before_ns: int) -> None:
        """Remove what is known of conversations with models that were not used since."""
        for one in self._databases():
            may_go = self.database_names and not one.path.name.startswith(self.database_names)
            if may_go and one.path.stat().st_mtime_ns < before_ns:
                one.path.unlink(missing_ok=True)
        self._count_databases()

    def _databases(self) -> list[ScannedFile]:
        return list(scan(self.folder / TRANSCRIPTS))

    def limit(self) -> int:
        """Return the bytes that the folder may have now."""
        disk = os.statvfs(self.folder)
        room = disk.f_bavail * disk.f_frsize + self.index.nbytes
        wanted = self._limits.max_size
        return int(min(wanted if isinstance(wanted, int) else wanted * room, self._limits.max_share * room))

    def _reason_of_limit(self) -> str:
        """Say why the folder may have no more bytes."""
        limit = self.metrics.max_bytes
        if limit == self._limits.max_size:
            return f"SSD_CACHE_MAX_SIZE is {limit:,}"
        return f"its folder may have {limit:,}, {self._limits.max_share:.0%} of what is free or its own"

    def _remove(self, file: CachedFile) -> None:
        self.index.remove(file)
        with suppress(OSError):
            file.path(self.folder).unlink(missing_ok=True)

    # ------------------------------------------------------------------------------------------------- counts

    def _note_written(self, nbytes: int) -> None:
        self._written_today.note(nbytes)
        self.metrics.written_files += 1
        self.metrics.written_bytes += nbytes
        self.metrics.written_today_bytes = self._written_today.today_bytes
        if not self._will_save_written:
            self._will_save_written = self._thread.submit(self._save_written, after_s=_WRITTEN_S)

    def _save_written(self) -> None:
        self._will_save_written = False
        self._written_today.save()

    def _count(self) -> None:
        self.metrics.files, self.metrics.nbytes = len(self.index), self.index.nbytes

    def _now_ns(self) -> int:
        return int(time.time() * 1e9)


@dataclass(frozen=True, slots=True)
class DiskAccess:
    """The prompt cache's dependencies for its disk tier.

    Attributes:
        shape: of the network's KV.
        is_in_place: the disk thread may write into arrays; see `cache.buffers.Incoming`.
        idle_s: seconds without use after which pages and states are written.
    """

    tier: DiskTier
    shape: KVShape
    is_in_place: bool = True
    idle_s: float = 30.0
