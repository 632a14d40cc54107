"""A file system of its own that is soon full."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

FILLER = "of somebody else"


@contextmanager
def small_disk(folder: Path, nbytes: int) -> Generator[Path]:
    """Mount a new file system of this size at a new folder. Only root can, and only on Linux."""
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("only root can mount a file system of its own")
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", folder], check=False)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path) -> Path:
    """Write a file that takes everything that is free, and return it."""
    path = disk / FILLER
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(65536)):
            pass
    return path
