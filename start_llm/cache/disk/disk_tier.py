"""The disk tier as the engine thread sees it: it hands files over and waits for others.

    start       lock the folder, begin the scan
    write       queue a file; `can_take` says whether there is room in the queue
    read, look  read files for a prompt that waits for them

The work itself is done on the disk thread, by `cache.disk.disk_worker`; what both threads use is in
`cache.disk.disk_traffic` and `cache.disk.disk_index`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from start_llm.cache.disk.disk_folder import DiskFolder, DiskLimits
from start_llm.cache.disk.disk_index import LOCK, CachedFile, FileName
from start_llm.cache.disk.disk_reads import DiskRead, DiskWait
from start_llm.cache.disk.disk_traffic import DiskTraffic
from start_llm.cache.disk.disk_worker import DiskWorker
from start_llm.cache.disk.shared_restore import RestorePeers
from start_llm.core.thread_owners import ENGINE, owned_by
from start_llm.storage.private_files import Lock, private_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from start_llm.cache.buffers import KVShape, Outgoing
    from start_llm.cache.disk.disk_worker import Superseded
    from start_llm.cache.disk.page_file import FileHeader
    from start_llm.storage.disk_thread import DiskThread
    from start_llm.telemetry.metrics import DiskMetrics

_UTIME_S = 10.0


class DiskTier:
    """The files of one folder.

    Args:
        say: called with a sentence for the user when the tier stays off, when its disk does not answer, and
            when it answers again.

    Attributes:
        is_on: the folder is ours.
        folder, index, traffic, worker: what does the work; see there which thread may use what.
    """

    def __init__(
        self,
        path: Path,
        limits: DiskLimits,
        thread: DiskThread,
        metrics: DiskMetrics,
        say: Callable[[str], None],
    ) -> None:
        self.metrics = metrics
        self.folder = DiskFolder(path, limits, metrics)
        self.index = self.folder.index
        self.traffic = DiskTraffic(metrics, limits.refused_s)
        self.worker = DiskWorker(self.folder, self.traffic, thread, say)
        self._thread = thread
        self._say = say
        self._lock = Lock(path / LOCK)
        self._will_write_used = False
        self.is_on = False
        self._unanswered: list[DiskWait] = []

    # --------------------------------------------------------------------- start and stop, by the main thread

    def start(self) -> bool:
        """Lock the folder and begin to scan it.

        Returns False if another server has it, or it cannot be used. The tier then stays off.
        """
        try:
            private_folder(self.folder.path)
            is_ours = self._lock.take()
        except OSError as error:
            return self._stays_off(f"the folder cannot be used: {error}")
        if not is_ours:
            return self._stays_off(f"process {self._lock.holder()} uses the folder")
        self.is_on = True
        self.worker.begin()
        return True

    def _stays_off(self, reason: str) -> bool:
        self.metrics.state = f"off: {reason}"
        self._say(f"The disk tier of the prompt cache stays off: {reason}.")
        return False

    def close(self) -> None:
        """Let the folder go. Call it when the disk thread has ended."""
        if self.is_on:
            self.is_on = False
            self.worker.end()
            self._lock.release()

    # ------------------------------------------------------------------------------------------------- write

    @property
    @owned_by(ENGINE)
    def can_take(self) -> bool:
        """True if a file can be queued now."""
        return (
            self.is_on
            and self.index.is_complete
            and not self.traffic.is_full
            and not self.worker.pause_left_s
        )

    @owned_by(ENGINE)
    def has(self, name: FileName) -> bool:
        """Return whether a file is there or queued."""
        return self.traffic.is_queued(name) or self.index.get(*name) is not None

    @owned_by(ENGINE)
    def wait_for_room(self, timeout_s: float) -> bool:
        """Wait until a file can be queued, after the scan. False if none can be in this time."""
        if self.is_on:
            self.traffic.wait_until(lambda: self.index.is_complete and not self.traffic.is_full, timeout_s)
        return self.can_take

    @owned_by(ENGINE)
    def write(self, header: FileHeader, content: Outgoing, used_ns: int, superseded: Superseded) -> None:
        """Queue a file.

        Args:
            content: its tensors. `release_written` lets go of them.
            used_ns: when it was used last, in nanoseconds of wall time.
            superseded: returns the files that are worth nothing beside it. Called on the disk thread.
        """
        name = header.kind, header.key
        self.traffic.note_queued(name)
        if not self._thread.submit(partial(self.worker.write, header, content, used_ns, superseded)):
            self.traffic.note_done(name)

    @owned_by(ENGINE)
    def release_written(self) -> None:
        """Let go of the arrays of written files, which frees memory of MLX."""
        for content in self.traffic.take_written():
            content.contents.clear()

    @owned_by(ENGINE)
    def touch(self, files: Iterable[tuple[CachedFile, int]]) -> None:
        """Record that these files, each with the number of tokens before it, are in use."""
        self.index.touch(files, time.time_ns())
        if not self._will_write_used:
            self._will_write_used = self._thread.submit(self._write_used, after_s=_UTIME_S)

    def _write_used(self) -> None:
        """On the disk thread."""
        self._will_write_used = False
        self.folder.write_times_of_use()

    # -------------------------------------------------------------------------------------------------- read

    @owned_by(ENGINE)
    def read(self, job: DiskRead) -> None:
        """Read files for a prompt. Several prompts take turns, file by file."""
        self.traffic.begin_read(job)
        self.worker.read_on(job)

    @owned_by(ENGINE)
    def take(self, job: DiskRead, parts: int) -> None:
        """Note that the first `parts` files of a job are where they belong: their buffers are free again."""
        if job.take(parts):
            self.worker.read_on(job)

    @owned_by(ENGINE)
    def look(self, files: list[CachedFile]) -> DiskWait:
        """Read the headers of files that are known by name alone."""
        wait = DiskWait()
        if not self._thread.submit(partial(self.worker.look, files, wait), is_urgent=True):
            self.traffic.end(wait)
        return wait

    @owned_by(ENGINE)
    def drop(self, file: CachedFile) -> None:
        """Remove a file. It can be written again at once."""
        self.index.remove(file)
        self._thread.submit(partial(self.folder.remove, file))

    @owned_by(ENGINE)
    def verify_later(self, files: Iterable[CachedFile]) -> None:
        """Check files whose content was computed: a damaged one would otherwise not be written again."""
        for file in files:
            is_new = not file.is_verified and self.traffic.begin_check(file.name)
            if is_new and not self._thread.submit(partial(self.worker.verify, file), may_wait=True):
                self.traffic.note_checked(file.name)

    @owned_by(ENGINE)
    def note_silence(self, wait: DiskWait) -> None:
        """Note that a prompt, of whatever model, has waited for this in vain."""
        if not self._unanswered:
            self._say("The disk tier of the prompt cache does not answer. Prompts are computed meanwhile.")
        self._unanswered.append(wait)

    @owned_by(ENGINE)
    def is_hanging(self) -> bool:
        """Return whether the disk still owes an answer for which a prompt has waited in vain."""
        was_hanging = bool(self._unanswered)
        self._unanswered = [wait for wait in self._unanswered if not wait.is_over]
        if was_hanging and not self._unanswered:
            self._say("The disk tier of the prompt cache answers again.")
        return bool(self._unanswered)


@dataclass(frozen=True, slots=True)
class DiskAccess:
    """The prompt cache's dependencies for its disk tier.

    Attributes:
        shape: of the network's KV.
        is_in_place: the disk thread may write into arrays; see `cache.buffers.Incoming`.
        idle_s: seconds without use after which pages and states are written.
        peers: the ranks that restore what this one does.
        is_shared: several ranks have to evict and stop alike, each with a disk of its own, so what is on it
            decides neither.
    """

    tier: DiskTier
    shape: KVShape
    is_in_place: bool = True
    idle_s: float = 30.0
    peers: RestorePeers = field(default_factory=RestorePeers)
    is_shared: bool = False
