"""The resources of a process: threads, descriptors, memory, children, temporary files. Linux only."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

_KERNELS = "mlx"
"""MLX puts what it compiles here, for as long as the machine likes."""


@dataclass(frozen=True)
class Held:
    """Resources of a process. After all is over they have to be what they were before."""

    threads: tuple[str, ...]
    descriptors: tuple[str, ...]
    children: tuple[str, ...]
    files: tuple[str, ...]

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        return cls(
            tuple(sorted(thread.name for thread in threading.enumerate())),
            tuple(sorted(_descriptors())),
            tuple(sorted(_children())),
            tuple(
                sorted(file.name for file in Path(tempfile.gettempdir()).iterdir() if file.name != _KERNELS)
            ),
        )

    def differences(self, now: Held) -> list[str]:
        return [
            f"{name}: {getattr(self, name)} before, {getattr(now, name)} after"
            for name in ("threads", "descriptors", "children", "files")
            if getattr(self, name) != getattr(now, name)
        ]


def _descriptors() -> Iterator[str]:
    """What the open descriptors of this process are: files by their paths, others by their kinds.

    Without what is read of `/proc`: fixtures of other tests watch their proxies in there.
    """
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            name = str(descriptor.readlink())
            if not name.startswith("/proc/"):
                yield re.sub("[0-9]+", "", name)


def _children() -> Iterator[str]:
    """Commands of the processes that this one has started, and that are still there."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                yield (folder / "cmdline").read_text().replace("\0", " ")[:80]


def resident_bytes() -> int:
    """Of this process, once the allocators have given back what is free."""
    gc.collect()
    mx.clear_cache()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
