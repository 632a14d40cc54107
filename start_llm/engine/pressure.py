"""How much memory should be given back, as the machine and MLX see it."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

_MEMINFO = Path("/proc/meminfo")
_FREE_SHARE = 0.03
"""Of the machine's memory, for everybody else on it."""


def shortage(budget_bytes: int, meminfo: Path = _MEMINFO) -> int:
    """Bytes beyond the budget, or that others on this machine lack; 0 if all is well.

    What MLX holds for later use goes first: then nothing that is kept has to go for it.

    Args:
        meminfo: of Linux. Other systems have none; there MLX's own figure has to do.
    """
    missing = _missing(budget_bytes, meminfo)
    if missing and mx.get_cache_memory():
        mx.clear_cache()
        missing = _missing(budget_bytes, meminfo)
    return missing


def _missing(budget_bytes: int, meminfo: Path) -> int:
    ours = mx.get_active_memory() + mx.get_cache_memory() - budget_bytes
    return max(ours, _lacking(meminfo), 0)


def _lacking(meminfo: Path) -> int:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return 0
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    wanted = int(sizes.get("MemTotal", 0) * _FREE_SHARE)
    return wanted - sizes.get("MemAvailable", wanted)
