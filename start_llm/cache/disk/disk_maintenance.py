"""Inspect and clean the folder of the disk tier for `start_llm cache`, without a model and without MLX."""

import os
import shutil
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from start_llm.cache.disk.disk_index import LOCK, TRANSCRIPTS, WRITTEN, CachedFile, scan
from start_llm.cache.disk.page_file import KINDS, RejectedFile, opened_file
from start_llm.storage.private_files import Lock


@dataclass(slots=True)
class FolderReport:
    """The contents of a folder.

    Attributes:
        files, nbytes: by kind: `pages`, `states` and `other`.
        unusable: files that cannot be used, each with the reason.
    """

    files: Counter[str] = field(default_factory=Counter[str])
    nbytes: Counter[str] = field(default_factory=Counter[str])
    unusable: dict[Path, str] = field(default_factory=dict[Path, str])


def report(folder: Path, *, verifies: bool = False) -> FolderReport:
    """Return what a folder holds.

    Args:
        verifies: read every page and state, and check it.

    Raises:
        OSError: the folder cannot be read.
    """
    contents = FolderReport()
    os.scandir(folder).close()
    for file in scan(folder):
        kind = file.cached.kind if file.cached else "other"
        contents.files[kind] += 1
        contents.nbytes[kind] += file.nbytes
        if verifies and file.cached and (reason := _fault(file.path, file.cached)):
            contents.unusable[file.path] = reason
    return contents


def _fault(path: Path, cached: CachedFile) -> str | None:
    """Return why a file cannot be used; None if it can be, or is gone by now."""
    try:
        with opened_file(path, cached.kind, cached.key) as file:
            file.verify()
    except RejectedFile as error:
        return error.reason if error.reason != "missing" else None
    except OSError as error:
        return error.strerror or "unreadable"
    return None


def clear(folder: Path) -> int:
    """Remove what a folder holds for the disk tier. Returns the number of files.

    Files that are none of ours stay.

    Raises:
        BlockingIOError: a server uses the folder.
        OSError: something cannot be removed.
    """
    lock = Lock(folder / LOCK)
    if not lock.take():
        raise BlockingIOError(lock.holder())
    try:
        count = 0
        for name in (*KINDS, TRANSCRIPTS):
            count += sum(1 for _ in scan(folder / name)) if (folder / name).is_dir() else 0
            with suppress(FileNotFoundError):
                shutil.rmtree(folder / name)
        (folder / WRITTEN).unlink(missing_ok=True)
        return count
    finally:
        lock.release()
