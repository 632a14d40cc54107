"""The memory that models run in: a GPU's own, one that it shares with the host, or the host's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

_MEMINFO = Path("/proc/meminfo")
_FREE_SHARE = 0.03
"""Of the memory, for everybody else on this machine."""


@dataclass(frozen=True, slots=True)
class Device:
    """Where arrays live.

    Attributes:
        name: as MLX or the system tells it.
        info: what MLX tells of it: on Metal `max_recommended_working_set_size`, on CUDA `total_memory` and
            `free_memory`, on a CPU neither.
        meminfo: of Linux. Other systems have none; there MLX's own figures have to do.
    """

    name: str
    info: Mapping[str, str | int]
    meminfo: Path = _MEMINFO

    @property
    def usable_bytes(self) -> int:
        """What models and caches may use: what Metal recommends, a card's own memory, else the host's."""
        wanted = self.info.get("max_recommended_working_set_size") or self.info.get("total_memory")
        return int(wanted or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    @property
    def has_own_memory(self) -> bool:
        """Arrays are not in the host's memory, so what the host lacks is no reason to let go of any."""
        return "total_memory" in self.info

    def lacking_bytes(self) -> int:
        """What others on this machine lack; 0 if nobody does."""
        if self.has_own_memory:
            return 0
        try:
            lines = self.meminfo.read_text().splitlines()
        except OSError:
            return 0
        sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (one.partition(":") for one in lines)}
        wanted = int(sizes.get("MemTotal", 0) * _FREE_SHARE)
        return max(wanted - sizes.get("MemAvailable", wanted), 0)


def this_device() -> Device:
    """The one that MLX computes on."""
    info = mx.device_info()
    return Device(str(info.get("device_name", mx.default_device())), info)


def wire_memory() -> None:
    """Keep weights and caches from being paged out, where there is a limit for that (Metal).

    Once, for good: the limit must not change while anything is computed.
    """
    wanted = mx.device_info().get("max_recommended_working_set_size")
    if wanted is not None:
        mx.set_wired_limit(int(wanted))
