"""What a process holds: threads, descriptors, memory, children, temporary files. Linux only."""

from __future__ import annotations

import ctypes
import gc
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

_KERNELS = "mlx"
"""Where MLX puts what it compiles, for as long as the machine likes."""


@dataclass(frozen=True)
class Held:
    """What is there after all is over has to be what was there before."""

    threads: tuple[str, ...]
    descriptors: int
    children: tuple[str, ...]
    files: tuple[str, ...]

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        return cls(
            tuple(sorted(thread.name for thread in threading.enumerate())),
            len(list(Path("/proc/self/fd").iterdir())),
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
