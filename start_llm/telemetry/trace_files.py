"""The files of the trace: their owner's alone, of bounded size, and never behind a link.

ROOT/2026-07-31/cache-session-0123456789abcdef.log      the newest lines
ROOT/2026-07-31/cache-session-0123456789abcdef.log.1    those before them
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from start_llm.core.private_files import private_folder

MOST_FILE_BYTES = 16 * 2**20
"""A line that would make its file longer begins a new one; of those before, the last one is kept."""
MOST_BYTES = 512 * 2**20
"""Of all files together. Beyond it the oldest go, until an eighth is free again."""
_FOLDER = re.compile(r"\d{4}-\d{2}-\d{2}")
_FILE = re.compile(r"cache-session-[0-9a-f]{16}\.log(\.1)?")
# Whoever puts a pipe in a file's place must not make the server wait for its reader.
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK


class TraceFiles:
    """Appends lines. Safe to use from any thread.

    Args:
        root: made if it is not there; in one that is there, nothing changes but what is ours by its name.
    """

    def __init__(
        self, root: Path, *, most_file_bytes: int = MOST_FILE_BYTES, most_bytes: int = MOST_BYTES
    ) -> None:
        self.root = root
        self._most_file_bytes = most_file_bytes
        self._most_bytes = most_bytes
        self._bytes: int | None = None
        self._lock = threading.Lock()

    def prepare(self, day: str) -> None:
        """Make the folder of a day.

        Raises:
            OSError: nothing can be written there.
        """
        with self._lock, self._folder(day):
            pass

    def append(self, day: str, session: str, line: bytes) -> None:
        """Write a line, all of it or nothing, and make room if it was too much.

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
            if self._bytes is None or self._bytes > self._most_bytes:
                self._bytes = self._make_room()

    @contextmanager
    def _folder(self, day: str) -> Generator[int]:
        private_folder(self.root)
        with suppress(FileExistsError):
            (self.root / day).mkdir(mode=0o700)
        with _opened(self.root / day, os.O_RDONLY | os.O_DIRECTORY) as folder:
            # It may have been there before us, and others may have been allowed to look into it.
            os.fchmod(folder, 0o700)
            yield folder

    def _append(self, folder: int, name: str, line: bytes) -> None:
        with _opened(name, _APPEND, folder) as file:
            size = _size_of(file)
            if not size or size + len(line) <= self._most_file_bytes:
                _write(file, line, size)
                return
        os.rename(name, f"{name}.1", src_dir_fd=folder, dst_dir_fd=folder)
        with _opened(name, _APPEND, folder) as file:
            _write(file, line, 0)

    def _make_room(self) -> int:
        """Returns the bytes that are left."""
        files = sorted(self._files())
        total = sum(size for _, size, _ in files)
        goal = total if total <= self._most_bytes else self._most_bytes * 7 // 8
        for _, size, path in files:
            if total <= goal:
                break
            # One that is gone, or that we may not delete, is no reason to keep the others.
            with suppress(OSError):
                path.unlink()
                total -= size
        return total

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """Age, size and path of every file that is ours by its name, and of no link."""
        for folder in os.scandir(self.root):
            if not (_FOLDER.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False)):
                continue
            # What is gone by now, or somebody else's, does not count.
            with suppress(OSError):
                yield from _files_in(folder)


def _files_in(folder: os.DirEntry[str]) -> Iterator[tuple[int, int, Path]]:
    for file in os.scandir(folder):
        if _FILE.fullmatch(file.name) and file.is_file(follow_symlinks=False):
            status = file.stat(follow_symlinks=False)
            yield status.st_mtime_ns, status.st_size, Path(file.path)


@contextmanager
def _opened(name: str | Path, flags: int, folder: int | None = None) -> Generator[int]:
    """A descriptor; a file that is made is its owner's alone from the beginning on."""
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
    """A disk that is full keeps no half of a line, which would spoil the next one.

    Args:
        size: of the file so far.
    """
    rest = memoryview(line)
    try:
        while rest:
            rest = rest[os.write(file, rest) :]
    except OSError:
        os.ftruncate(file, size)
        raise
