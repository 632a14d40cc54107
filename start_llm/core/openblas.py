"""Preload OpenBLAS, with which MLX computes float32 on a CPU under Linux about 30 times faster.

This file needs only the standard library and Python 3.9, because `install_and_run.py` runs it too. A library
can be preloaded only when a process starts, so a process that lacks it starts itself again.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

# Paths of an OpenBLAS with threads and the cblas names: on Debian and Ubuntu, on Fedora, on Arch.
PLACES = (
    f"/usr/lib/{platform.machine()}-linux-gnu/openblas-pthread/libblas.so.3",
    "/usr/lib64/libopenblasp.so.0",
    "/usr/lib/libopenblas.so.0",
)
ADVICE = """\
note: OpenBLAS is missing. It makes float32 on the CPU about 30 times faster than the BLAS in MLX's wheel:
      apt install libopenblas0-pthread    (Fedora: dnf install openblas-threads, Arch: pacman -S openblas)"""
_MAPPED = Path("/proc/self/maps")
_BLAS = re.compile(r"\S*/lib\w*blas\S*$", re.MULTILINE)


def find_openblas(places: Iterable[str] = PLACES) -> str | None:
    """Return the path of OpenBLAS; None if there is none, or this is not Linux."""
    if sys.platform != "linux":
        return None
    return next((place for place in places if Path(place).is_file()), None)


def with_openblas(environment: Mapping[str, str], library: str) -> dict[str, str]:
    """Return variables with which a process has the library in front of all that is preloaded already."""
    preloaded = re.split(r"[: ]+", environment.get("LD_PRELOAD", ""))
    others = [other for other in preloaded if other not in ("", library)]
    return {**environment, "LD_PRELOAD": ":".join([library, *others])}


def run_with_openblas() -> None:
    """Start this program again with OpenBLAS, in place of this process, unless it has it or there is none."""
    library = find_openblas()
    if library is None:
        return
    environment = with_openblas(os.environ, library)
    if environment["LD_PRELOAD"] != os.environ.get("LD_PRELOAD"):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)  # noqa: S606


def blas_in_use(mapped: Path = _MAPPED) -> str | None:
    """Return the path of the BLAS that this process calls; None if it has none, or this is not Linux.

    A preloaded library answers before the one that MLX brings. Both are mapped.
    """
    try:
        paths = list(dict.fromkeys(_BLAS.findall(mapped.read_text(errors="replace"))))
    except OSError:
        return None
    return next((path for path in paths if "/site-packages/" not in path), next(iter(paths), None))
