"""Folders and files that are their owner's alone, from the moment they are there, whatever the umask."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

_NEVER_A_LINK = os.O_NOFOLLOW | os.O_NONBLOCK


def private_folder(path: Path) -> None:
    """Make it, with those above it that are missing. What is there stays as it is.

    Raises:
        OSError: it cannot be made, or something else is there.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def private_opener(path: str, flags: int) -> int:
    """For `open`."""
    return os.open(path, flags, 0o600)


class Lock:
    """A file that one process at a time holds: it ends with the process, however that ends.

    Not its being there counts, but the kernel's lock on it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def take(self) -> bool:
        """Whether it is ours now.

        Raises:
            OSError: there can be no such file.
        """
        private_folder(self._path.parent)
        while True:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | _NEVER_A_LINK, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                return False
            if self._is_in_place(file):
                break
            # Who held it has taken the file away between our two calls.
            os.close(file)
        os.ftruncate(file, 0)
        os.write(file, str(os.getpid()).encode())
        self._file = file
        return True

    def holder(self) -> str:
        """The number of the process that holds it, as it said."""
        with suppress(OSError):
            return self._path.read_text(errors="replace")[:20] or "unknown"
        return "unknown"

    def release(self) -> None:
        """Does nothing if it is not ours."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def _is_in_place(self, file: int) -> bool:
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(file), self._path.stat(follow_symlinks=False))
        return False
