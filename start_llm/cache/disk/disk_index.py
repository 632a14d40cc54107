"""An index, in memory, of the files in the disk tier's folder. Each start rebuilds it by a scan.

A file's name is `<kind>/<first 2 letters of the key>/<parent key>-<key>.safetensors`, so the scan opens no
file. What the name does not tell, tokens and tensors, is read when a prompt first comes by.

Safe to use from any thread: the engine thread plans with it, and notes which files are in use and which have
to go; the disk thread adds and removes files.
"""

import math
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from start_llm.cache.disk.page_file import KINDS, TEMPORARY, FileHeader, FileKind

LOCK = "lock"
WRITTEN = "written.json"
"""How much was written today."""
TRANSCRIPTS = "transcripts"
"""Folder of what is known of conversations."""
SUFFIX = ".safetensors"
_NAME = re.compile(rf"([0-9a-f]{{32}})-([0-9a-f]{{32}}){re.escape(SUFFIX)}")
_KINDS: Mapping[str, FileKind] = {kind: kind for kind in KINDS}
TOKEN_NS = 1000
"""Of what was used together, the end is older by this much for each token before it, and goes first."""

type FileName = tuple[FileKind, bytes]
"""Kind and key."""


@dataclass(eq=False, slots=True)
class CachedFile:
    """A file of the disk tier.

    Attributes:
        key, parent: keys of the prefixes that end with and before its tokens.
        used_ns: when it was last used, in nanoseconds of wall time; the file's modification time.
        header: what it holds; None until it was read.
        is_verified: this process has written it, or read all of it, and it was right.
        is_passed_over: it was not read because computing is faster, so nothing suggests that it is damaged.
        left_out_until: when it may be read again after an error, in seconds of `time.monotonic`; infinity: at
            the next start.
    """

    kind: FileKind
    key: bytes
    parent: bytes
    nbytes: int
    used_ns: int
    header: FileHeader | None = None
    is_verified: bool = False
    is_passed_over: bool = False
    left_out_until: float = 0.0

    @property
    def name(self) -> FileName:
        return self.kind, self.key

    @property
    def is_left_out(self) -> bool:
        """True if it could not be read, and is not asked for again yet."""
        return time.monotonic() < self.left_out_until

    @property
    def is_lost(self) -> bool:
        """True if it is left out until the next start."""
        return self.left_out_until == math.inf

    def path(self, folder: Path) -> Path:
        key = self.key.hex()
        return folder / self.kind / key[:2] / f"{self.parent.hex()}-{key}{SUFFIX}"


def file_at(path: Path, status: os.stat_result) -> CachedFile | None:
    """Return the file that should be at this path; None if it is none of ours."""
    kind_folder, key_folder, name = path.parts[-3:] if len(path.parts) > 2 else ("", "", "")
    kind, match = _KINDS.get(kind_folder), _NAME.fullmatch(name)
    if kind is None or match is None or key_folder != match[2][:2]:
        return None
    parent, key = map(bytes.fromhex, match.groups())
    used_ns = min(status.st_mtime_ns, time.time_ns())  # a clock that was ahead would keep it for that long
    return CachedFile(kind, key, parent, status.st_size, used_ns)


class DiskIndex:
    """The files of the folder.

    Attributes:
        other_bytes: size of what else is in the folder.
        is_complete: the scan has ended.
    """

    def __init__(self) -> None:
        self.other_bytes = 0
        self.is_complete = False
        self._files: dict[FileName, CachedFile] = {}
        self._after: defaultdict[bytes, list[CachedFile]] = defaultdict(list)
        self._nbytes = 0
        self._touched: dict[FileName, CachedFile] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._files)

    @property
    def nbytes(self) -> int:
        """Size of everything in the folder."""
        return self._nbytes + self.other_bytes

    def get(self, kind: FileKind, key: bytes) -> CachedFile | None:
        """Return a file, unless it is left out."""
        file = self.entry((kind, key))
        return None if file is None or file.is_left_out else file

    def entry(self, name: FileName) -> CachedFile | None:
        """Return a file, also one that is left out."""
        return self._files.get(name)

    def after(self, kind: FileKind, parent: bytes) -> list[CachedFile]:
        """Return the files whose tokens follow this prefix, but for those that are left out. A state at its
        end has no tokens, but is among them.
        """
        with self._lock:
            following = self._after.get(parent, ())
            return [file for file in following if file.kind == kind and not file.is_left_out]

    def add(self, file: CachedFile) -> None:
        """Add a file. It replaces one of the same name."""
        with self._lock:
            self._remove(file.name)
            self._files[file.name] = file
            self._after[file.parent].append(file)
            self._nbytes += file.nbytes

    def remove(self, file: CachedFile) -> None:
        with self._lock:
            self._remove(file.name)

    def _remove(self, name: FileName) -> None:
        file = self._files.pop(name, None)
        if file is None:
            return
        self._touched.pop(name, None)
        self._after[file.parent].remove(file)
        if not self._after[file.parent]:
            del self._after[file.parent]
        self._nbytes -= file.nbytes

    def touch(self, files: Iterable[tuple[CachedFile, int]], now_ns: int) -> None:
        """Record that these files are in use.

        Args:
            files: each with the number of tokens before it.
        """
        with self._lock:
            for file, start in files:
                if file.name in self._files:
                    file.used_ns = now_ns - start * TOKEN_NS
                    self._touched[file.name] = file

    def take_touched(self) -> list[CachedFile]:
        """Return the files whose time of use is not on the disk yet, and forget which they are."""
        with self._lock:
            touched, self._touched = list(self._touched.values()), {}
            return touched

    def oldest_first(self) -> list[CachedFile]:
        with self._lock:
            return sorted(self._files.values(), key=lambda file: file.used_ns)


@dataclass(frozen=True, slots=True)
class ScannedFile:
    """A file in the folder, whoever's it is.

    Attributes:
        cached: what it is, if its name is one of ours.
        is_left_over: a process ended while it wrote one of ours.
    """

    path: Path
    nbytes: int
    cached: CachedFile | None
    is_left_over: bool


def scan(folder: Path) -> Iterator[ScannedFile]:
    """Yield every file below a folder. Links are not followed. What cannot be read is left out."""
    waiting = [folder]
    while waiting:
        for entry in _entries(waiting.pop()):
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
                    continue
                status = entry.stat(follow_symlinks=False)
                path = Path(entry.path)
                is_unfinished = path.name.endswith(SUFFIX + TEMPORARY)
                is_left_over = is_unfinished and file_at(path.with_suffix(""), status) is not None
                yield ScannedFile(path, status.st_size, file_at(path, status), is_left_over)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with suppress(OSError), os.scandir(folder) as entries:
        return list(entries)
    return []
