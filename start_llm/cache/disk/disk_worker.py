"""The disk tier's work on the disk thread: scan the folder, write files, read and check them.

A file that cannot be used is removed and counted, unless the system could not read it: then it is left out,
for seconds, or until the next start. If the disk is full or cannot be written, the worker steps back: it
writes nothing for a while, and goes on when it can.
What cannot be written whatever the disk does is refused, and nothing else waits for it.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from start_llm.cache.disk.disk_folder import Room
from start_llm.cache.disk.disk_index import WRITTEN, CachedFile, DiskIndex, FileName, scan
from start_llm.cache.disk.disk_reads import DiskRead, DiskWait, FilePart
from start_llm.cache.disk.page_file import FileHeader, OpenedFile, RejectedFile, opened_file, write_file
from start_llm.cache.disk.write_limit import DailyWriteLimit
from start_llm.core.thread_owners import DISK, ENGINE, owned_by

if TYPE_CHECKING:
    from start_llm.cache.buffers import Outgoing
    from start_llm.cache.disk.disk_folder import DiskFolder
    from start_llm.cache.disk.disk_index import ScannedFile
    from start_llm.cache.disk.disk_traffic import DiskTraffic
    from start_llm.storage.disk_thread import DiskThread

_WRITTEN_S = 5.0
_DAY_CHECK_S = 60.0
_SCAN_SLICE_S = 0.2
_MOST_SCAN_WAIT_S = 5.0
"""For which prompts wait for the scan; after that the files that it has not found yet are missed."""
_NO_FILES = frozenset({errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO, errno.ESPIPE})
"""Errors that say that something else is in a file's place. With others it may be read at the next try."""

type Reader = Callable[[CachedFile], FileHeader | None]
"""Returns what a file says of itself; None if it cannot be used. On the disk thread."""

type Superseded = Callable[[DiskIndex, Reader], list[CachedFile]]
"""Returns the files that are worth nothing beside a new one. On the disk thread."""


class DiskWorker:
    """Does one job at a time; a `DiskTier` submits them.

    Args:
        say: called with a sentence for the user when a file cannot be used or written, when the worker
            pauses, and when it goes on.

    Attributes:
        scanned: over once the index is complete, or at the first pause of the scan after 5 s: then files not
            found yet are missed.
    """

    def __init__(
        self, folder: DiskFolder, traffic: DiskTraffic, thread: DiskThread, say: Callable[[str], None]
    ) -> None:
        self.scanned = DiskWait()
        self._folder = folder
        self._index = folder.index
        self._metrics = folder.metrics
        self._traffic = traffic
        self._thread = thread
        self._say = say
        self._paused_until = 0.0
        self._has_reported_file = self._has_reported_refusal = self._has_reported_pause = False
        self._will_save_written = self._will_end_pause = False
        self._written_today = DailyWriteLimit(folder.path / WRITTEN, folder.limits.max_write_per_day)

    @property
    @owned_by(ENGINE, DISK)
    def pause_left_s(self) -> float:
        """Seconds for which nothing is written, because there was an error, or enough was written today."""
        pause = max(self._paused_until - time.monotonic(), 0)
        return max(pause, _DAY_CHECK_S) if self._written_today.is_reached else pause

    # --------------------------------------------------------------------------------------- start and end

    def begin(self) -> None:
        """Read how much was written earlier today, and begin the scan. Before the thread runs."""
        if not self._written_today.load():
            self._say(
                f"{WRITTEN} of the disk tier is damaged: what was written earlier today is not counted."
            )
        self._metrics.written_today_bytes = self._written_today.today_bytes
        self._metrics.state = "scanning"
        files = scan(self._folder.path)
        self._thread.submit(lambda: self._scan(files, time.perf_counter()), is_urgent=True)

    def end(self) -> None:
        """Write down what is only in memory. When the thread has ended."""
        self._folder.write_times_of_use()
        self._written_today.save()

    def _scan(self, files: Iterator[ScannedFile], began: float) -> None:
        """Add some of the files that are found. The rest comes after what somebody waits for."""
        pause = time.perf_counter() + _SCAN_SLICE_S
        try:
            for file in files:
                self._folder.add_scanned(file)
                if time.perf_counter() > pause:
                    self._scan_later(files, began)
                    return
            self._index.is_complete = True
            self._metrics.state = "on"
            self._goes_on()
            self._folder.keep_quota(self._traffic.being_read)
        except Exception as error:  # noqa: BLE001 - prompts wait for the scan, and nothing is written before
            self._index.is_complete = True
            self._step_back(error)
        self._folder.count()
        self._traffic.end(self.scanned)

    def _scan_later(self, files: Iterator[ScannedFile], began: float) -> None:
        if not self.scanned.is_over and time.perf_counter() - began > _MOST_SCAN_WAIT_S:
            self._traffic.end(self.scanned)
        self._thread.submit(lambda: self._scan(files, began), is_urgent=not self.scanned.is_over)

    # ----------------------------------------------------------------------------------------------- writing

    @owned_by(DISK)
    def write(self, header: FileHeader, content: Outgoing, used_ns: int, superseded: Superseded) -> None:
        """Write a file, and remove what is worth nothing beside it; see `DiskTier.write`."""
        name = header.kind, header.key
        try:
            file = CachedFile(*name, header.parent, header.nbytes, used_ns, header, is_verified=True)
            room = self._folder.make_room(file, self._traffic.being_read)
            if room is Room.FITS:
                self._write_file(file, header, content)
                self._remove_superseded(superseded)
                self._goes_on()
            elif room is not Room.TOO_OLD:
                self._note_no_room(room, file)
        except OSError as error:
            self._step_back(error)
        except Exception as error:  # noqa: BLE001 - the next file may be written all the same
            self.refuse(name, error)
        finally:
            self._folder.count()
            self._traffic.note_done(name, content)

    def _write_file(self, file: CachedFile, header: FileHeader, content: Outgoing) -> None:
        path = file.path(self._folder.path)
        write_file(path, header, content.contents)
        self._index.add(file)
        with suppress(OSError):
            os.utime(path, ns=(file.used_ns, file.used_ns))
        self._note_written(file.nbytes)

    def _remove_superseded(self, superseded: Superseded) -> None:
        being_read = self._traffic.being_read
        for obsolete in superseded(self._index, self.header_of):
            if obsolete.name not in being_read:
                self._folder.remove(obsolete)

    def _note_no_room(self, room: Room, file: CachedFile) -> None:
        self._metrics.note_lost()
        reason = f"there is no room for {file.nbytes:,} bytes; {self._folder.reason_of_limit()}"
        if room is Room.FULL:
            self._pause(reason)
        else:
            self._refuse(file.name, reason)

    @owned_by(ENGINE, DISK)
    def refuse(self, name: FileName, error: Exception) -> None:
        """Note that a page or a state cannot be written, so that it is not tried again for some minutes."""
        self._metrics.note_error()
        self._refuse(name, repr(error))

    def _refuse(self, name: FileName, reason: str) -> None:
        self._traffic.note_refused(name)
        if not self._has_reported_refusal:
            self._has_reported_refusal = True
            self._say(
                f"A part of the prompt cache cannot be written to the disk: {reason}. After a restart it is "
                "computed anew. Others like it are counted under lost and errors of /stats."
            )

    def _note_written(self, nbytes: int) -> None:
        self._written_today.note(nbytes)
        self._metrics.written_files += 1
        self._metrics.written_bytes += nbytes
        self._metrics.written_today_bytes = self._written_today.today_bytes
        if not self._will_save_written:
            self._will_save_written = self._thread.submit(self._save_written, after_s=_WRITTEN_S)

    def _save_written(self) -> None:
        self._will_save_written = False
        self._written_today.save()

    def _step_back(self, error: Exception) -> None:
        self._metrics.note_error()
        self._pause(str(error) if isinstance(error, OSError) else repr(error))

    def _pause(self, reason: str) -> None:
        """Write nothing for a while, and say so once until something could be written again."""
        self._paused_until = time.monotonic() + self._folder.limits.pause_s
        self._metrics.state = "paused"
        self._end_pause()
        if not self._has_reported_pause:
            self._has_reported_pause = True
            self._say(f"The disk tier of the prompt cache pauses: {reason}.")

    def _end_pause(self) -> None:
        """Note the end of the pause when it has come. That it goes on is said when something is written."""
        if (left := self.pause_left_s) and not self._will_end_pause:
            self._will_end_pause = self._thread.submit(self._look_at_pause, after_s=left)
        elif not left and self._metrics.state == "paused":
            self._metrics.state = "on"

    def _look_at_pause(self) -> None:
        self._will_end_pause = False
        self._end_pause()

    def _goes_on(self) -> None:
        """Say that something could be written again, unless the pause holds or enough was written today."""
        if self._written_today.is_reached:
            most = f"{self._folder.limits.max_write_per_day:,}"
            self._pause(f"SSD_CACHE_MAX_WRITE_PER_DAY is {most}, and no less was written since midnight UTC")
        elif self._has_reported_pause and not self.pause_left_s:
            self._has_reported_pause = False
            self._metrics.state = "on"
            self._say("The disk tier of the prompt cache goes on.")

    # ----------------------------------------------------------------------------------------------- reading

    @owned_by(ENGINE, DISK)
    def read_on(self, job: DiskRead) -> None:
        """Read the next file of a job when its turn comes; end the job if the thread is closing."""
        if not self._thread.submit(lambda: self._read(job), is_urgent=True):
            self._traffic.end(job)

    def _read(self, job: DiskRead) -> None:
        """Read a file of a job, so that several prompts take turns."""
        has_more, began = False, time.perf_counter()
        try:
            if not job.is_given_up and self._read_part(job.parts[job.done]):
                job.done += 1
                has_more = job.done < len(job.parts)
        finally:
            job.seconds += time.perf_counter() - began
            if not has_more:
                self._traffic.end(job)
        if has_more:
            if not job.pauses():
                self.read_on(job)
            if job.most_ahead is not None:
                self._traffic.notify()

    def _read_part(self, part: FilePart) -> bool:
        def read(opened: OpenedFile) -> None:
            header = opened.header
            if header.parent != part.parent or header.tokens != part.tokens:
                raise RejectedFile("tokens")
            if tuple(header.tensors.values()) != part.tensors:
                raise RejectedFile("layout")
            opened.read_into(part.targets())

        is_right = self._is_right(part.file, read)
        part.file.is_verified |= is_right
        return is_right

    @owned_by(DISK)
    def look(self, files: list[CachedFile], wait: DiskWait) -> None:
        """Read the headers of files that are known by name alone, for whom `wait` is."""
        try:
            for file in files:
                self.header_of(file)
        finally:
            self._traffic.end(wait)

    @owned_by(DISK)
    def verify(self, file: CachedFile) -> None:
        """Read a file whole, if it is still in the index and nobody has."""
        try:
            if self._index.get(*file.name) is file and not file.is_verified:
                file.is_verified = self._is_right(file, OpenedFile.verify)
        finally:
            self._traffic.note_checked(file.name)

    @owned_by(DISK)
    def header_of(self, file: CachedFile) -> FileHeader | None:
        """Return what a file says of itself; None if it cannot be used."""
        if file.header is None:
            self._is_right(file, partial(self._learn, file))
        return file.header

    def _learn(self, file: CachedFile, opened: OpenedFile) -> None:
        if opened.header.parent != file.parent:
            raise RejectedFile("key")
        file.header = opened.header

    def _is_right(self, file: CachedFile, use: Callable[[OpenedFile], None]) -> bool:
        """Open a file and use it. A damaged file is removed and counted; one that cannot be read is left out:
        until the next start if its medium fails, else for some seconds. What else `use` raises says nothing
        of the file.
        """
        try:
            with opened_file(file.path(self._folder.path), *file.name) as opened:
                use(opened)
        except RejectedFile as error:
            self._reject(file, error.reason)
        except OSError as error:
            if error.errno in _NO_FILES:
                self._reject(file, "unreadable")
            else:
                self._metrics.note_error()
                self._folder.leave_out(file, is_lost=error.errno == errno.EIO)
        else:
            return True
        return False

    def _reject(self, file: CachedFile, reason: str) -> None:
        self._metrics.rejected[reason] += 1
        if reason != "missing" and not self._has_reported_file:
            self._has_reported_file = True
            self._say(
                f"A file of the disk tier cannot be used ({reason}) and is removed: what it held is computed "
                "anew. Others like it are counted under rejected_files of /stats."
            )
        self._folder.remove(file)
        self._folder.count()
