"""The files of the trace: private to their owner, of limited size, and never behind a link.

ROOT/2026-07-31/cache-session-0123456789abcdef.log      the newest lines
ROOT/2026-07-31/cache-session-0123456789abcdef.log.1    those before them
"""

import fcntl
import os
import re
import stat
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from start_llm.storage.private_files import private_folder

MAX_FILE_BYTES = 16 * 2**20
"""Largest size of a file. A longer one is replaced by a new one; only the last old one is kept."""
MAX_BYTES = 512 * 2**20
"""Largest size of all files together. Beyond it the oldest are deleted, until an eighth is free."""
_FOLDER = re.compile(r"\d{4}-\d{2}-\d{2}")
_FILE = re.compile(r"cache-session-[0-9a-f]{16}\.log(\.1)?")
# O_NONBLOCK: a pipe in a file's place must not make the server wait for a reader.
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK


class TraceFiles:
    """Appends lines to trace files. Safe to use from any thread.

    Args:
        root: created if missing; in an existing folder, only trace files are changed, known by their names.
    """

    def __init__(
        self, root: Path, *, max_file_bytes: int = MAX_FILE_BYTES, max_bytes: int = MAX_BYTES
    ) -> None:
        self.root = root
        self._max_file_bytes = max_file_bytes
        self._max_bytes = max_bytes
        self._bytes: int | None = None
        self._lock = threading.Lock()

    def prepare(self, day: str) -> None:
        """Create the folder of a day.

        Raises:
            OSError: nothing can be written there.
        """
        with self._lock, self._folder(day):
            pass

    def append(self, day: str, session: str, line: bytes) -> None:
        """Write a line completely or not at all, and delete old files if there are too many bytes.

        Args:
            day: as in 2026-07-31.
            session: 16 hexadecimal digits.

        Raises:
            OSError: it could not be written.
        """
        with self._lock:
            with self._folder(day) as folder:
                # Another server may write into the same folder.
                fcntl.flock(folder, fcntl.LOCK_EX)
                self._append(folder, f"cache-session-{session}.log", line)
            self._bytes = None if self._bytes is None else self._bytes + len(line)
            if self._bytes is None or self._bytes > self._max_bytes:
                self._bytes = self._make_room()

    @contextmanager
    def _folder(self, day: str) -> Generator[int]:
        private_folder(self.root)
        with suppress(FileExistsError):
            (self.root / day).mkdir(mode=0o700)
        with _opened(self.root / day, os.O_RDONLY | os.O_DIRECTORY) as folder:
            # The folder may have existed before, readable by others.
            os.fchmod(folder, 0o700)
            yield folder

    def _append(self, folder: int, name: str, line: bytes) -> None:
        with _opened(name, _APPEND, folder) as file:
            size = _size_of(file)
            if not size or size + len(line) <= self._max_file_bytes:
                _write(file, line, size)
                return
        os.rename(name, f"{name}.1", src_dir_fd=folder, dst_dir_fd=folder)
        with _opened(name, _APPEND, folder) as file:
            _write(file, line, 0)

    def _make_room(self) -> int:
        """Delete the oldest files if there are too many bytes. Returns the bytes that are left."""
        files = sorted(self._files())
        total = sum(size for _, size, _ in files)
        goal = total if total <= self._max_bytes else self._max_bytes * 7 // 8
        for _, size, path in files:
            if total <= goal:
                break
            # Files that are gone, or that may not be deleted, must not stop the others.
            with suppress(OSError):
                path.unlink()
                total -= size
        return total

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """Yield time, size and path of every trace file, known by its name, that is not a link."""
        for folder in os.scandir(self.root):
            if not (_FOLDER.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False)):
                continue
            # Ignore folders that are gone by now or belong to somebody else.
            with suppress(OSError):
                yield from _files_in(folder)


def _files_in(folder: os.DirEntry[str]) -> Iterator[tuple[int, int, Path]]:
    for file in os.scandir(folder):
        if _FILE.fullmatch(file.name) and file.is_file(follow_symlinks=False):
            status = file.stat(follow_symlinks=False)
            yield status.st_mtime_ns, status.st_size, Path(file.path)


@contextmanager
def _opened(name: str | Path, flags: int, folder: int | None = None) -> Generator[int]:
    """Open a file descriptor. A new file is private to its owner from its creation on."""
    descriptor = os.open(name, flags | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _size_of(file: int) -> int:
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise OSError("there is something in its place that is no file")
    return status.st_size


def _write(file: int, line: bytes, size: int) -> None:
    """Write a line. If the disk is full, remove the partial line, which would damage the next one.

    Args:
        size: bytes in the file so far.
    """
    rest = memoryview(line)
    try:
        while rest:
            rest = rest[os.write(file, rest) :]
    except OSError:
        os.ftruncate(file, size)
        raise
