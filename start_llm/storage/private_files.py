"""Folders, files and locks that only their owner can access from their creation on, whatever the umask."""

import errno
import fcntl
import os
from contextlib import ExitStack, suppress
from pathlib import Path

_NEVER_A_LINK = os.O_NOFOLLOW | os.O_NONBLOCK


def private_folder(path: Path) -> None:
    """Make a folder and its missing parents. Existing ones are not changed.

    Raises:
        OSError: it cannot be made, or the path is not a folder.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def private_opener(path: str, flags: int) -> int:
    """Open a file with mode 0600; an opener for `open`."""
    return os.open(path, flags, 0o600)


def private_file(path: Path) -> None:
    """Make a file if it is missing. From then on it is private.

    A file that exists is not opened: closing it would end the locks that SQLite has on it for this process.

    Raises:
        OSError: it cannot be made, or the path is a link or a folder.
    """
    if path.is_symlink() or not path.is_file():
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | _NEVER_A_LINK, 0o600))
    path.chmod(0o600)


class Lock:
    """A lock file that one process at a time holds. The lock ends when the process ends.

    The kernel's lock counts, not the file's existence.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def take(self) -> bool:
        """Take the lock. Returns False if another process holds it.

        Raises:
            OSError: the file cannot be made or locked.
        """
        private_folder(self._path.parent)
        while True:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | _NEVER_A_LINK, 0o600)
            with ExitStack() as unless_taken:
                unless_taken.callback(os.close, file)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
                if self._is_in_place(file):
                    unless_taken.pop_all()
                    break
                # The previous holder has removed the file between these two calls.
        self._file = file
        with suppress(OSError):  # a full disk has no room for the id, which only `holder` needs
            os.ftruncate(file, 0)
            os.write(file, str(os.getpid()).encode())
        return True

    def holder(self) -> str:
        """Return the id of the process that holds the lock, as the file has it."""
        with suppress(OSError):
            return self._path.read_text(errors="replace")[:20] or "unknown"
        return "unknown"

    def release(self) -> None:
        """Release the lock and remove the file. Does nothing if this process does not hold it."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def _is_in_place(self, file: int) -> bool:
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(file), self._path.stat(follow_symlinks=False))
        return False
