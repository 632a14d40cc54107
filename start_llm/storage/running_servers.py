"""Files that name the running servers, one for each, so that commands of the same user find them.

A server holds a lock on its file until its process ends, however that happens. So a file without a lock is
stale.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from start_llm.storage.private_files import private_folder

_ENDING = ".json"
_LOADING = ".loading.json"
_MAX_BYTES = 65_536
_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """A server of this user.

    Attributes:
        url: its address without `/v1`.
        proxy_url: its proxy's, or None.
        started_at: in seconds since 1970.
        is_loading: it still loads its first model, and answers nobody.
    """

    pid: int
    url: str
    proxy_url: str | None
    version: str
    started_at: float
    is_loading: bool = False

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


class ServerFile:
    """The file of this process's server, in the folder of all of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None
        self._file: int | None = None

    def write(self, server: RunningServer) -> None:
        """Write the file of a server that is still loading.

        Raises:
            OSError: it cannot be written.
        """
        private_folder(self._folder)
        path = self._folder / f"{server.pid}-{server.port}{_LOADING}"
        unseen = path.with_suffix(".new")
        unseen.unlink(missing_ok=True)
        file = os.open(unseen, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        os.write(file, json.dumps(asdict(server)).encode())
        unseen.rename(path)
        self._file, self._path = file, path

    def tell_ready(self) -> None:
        """Tell that the server answers."""
        if self._path is not None:
            ready = self._path.with_name(self._path.name.removesuffix(_LOADING) + _ENDING)
            with suppress(OSError):
                self._path.rename(ready)
                self._path = ready

    def remove(self) -> None:
        """Remove the file, if there is one. A signal handler may call this, so it takes no lock."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()
            self._path = None
        if self._file is not None:
            os.close(self._file)
            self._file = None


def running_servers(folder: Path) -> list[RunningServer]:
    """Return the servers that run now, the newest first, and remove files that killed servers left behind.

    Raises:
        OSError: the folder belongs to another user.
    """
    for _ in range(_TRIES):
        with suppress(FileNotFoundError):
            # A server may become ready, or end, between the listing and the opening of its file.
            return sorted(_all(folder), key=lambda server: server.started_at, reverse=True)
    return []


def _all(folder: Path) -> Iterator[RunningServer]:
    for path in folder.iterdir():
        if path.name.endswith(_ENDING) and (server := _running(path)):
            yield server


def _running(path: Path) -> RunningServer | None:
    """Return the server of a file; None if it has ended. Then the file is removed."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with closing(os.fdopen(file, "rb")) as stream:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _parsed(stream.read(_MAX_BYTES), is_loading=path.name.endswith(_LOADING))
        path.unlink(missing_ok=True)
        return None


def _parsed(content: bytes, *, is_loading: bool) -> RunningServer | None:
    """Return what a file says; None if another version of start_llm has written it, or if it is damaged."""
    with suppress(ValueError, TypeError, RecursionError):
        match json.loads(content):
            case {
                "pid": int(),
                "url": str(url),
                "proxy_url": str() | None,
                "started_at": int() | float(),
            } as values:
                int(url.rpartition(":")[2])
                return RunningServer(**values | {"is_loading": is_loading})
            case _:
                pass
    return None
