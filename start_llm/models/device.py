"""Reports the memory that models use: a GPU's own, memory shared with the host, or the host's."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx

from start_llm.core.kernel_files import kernel_text
from start_llm.models.memory_limits import MemoryLimit, memory_limits, physical_bytes
from start_llm.storage.private_files import private_folder

_KERNELS = "MLX_PTX_CACHE_DIR"
_MEMINFO = Path("/proc/meminfo")
_FREE_SHARE = 0.03
"""Share of the host's memory to leave to other processes."""


@dataclass(frozen=True, slots=True)
class Device:
    """The device that holds the arrays.

    Attributes:
        name: as MLX or the system reports it.
        info: what MLX reports: on Metal `max_recommended_working_set_size`, on CUDA `total_memory` and
            `free_memory`, on a CPU neither.
        meminfo: Linux's memory figures; other systems have no such file, and their shortage is not known.
        limits: of the host's memory, for this process.
    """

    name: str
    info: Mapping[str, str | int]
    meminfo: Path = _MEMINFO
    limits: Sequence[MemoryLimit] = field(default_factory=lambda: [*memory_limits()])

    @property
    def kind(self) -> str:
        """CPU, Metal or CUDA."""
        if self.has_own_memory:
            return "CUDA"
        return "Metal" if "max_recommended_working_set_size" in self.info else "CPU"

    @property
    def usable_bytes(self) -> int:
        """Bytes for models and caches: Metal's recommendation, a card's memory, or the host's."""
        wanted = self.info.get("max_recommended_working_set_size") or self.info.get("total_memory")
        return int(wanted or self.host_bytes)

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory, or the part of it that a container or a service may have."""
        return min([physical_bytes(), *(limit.most_bytes for limit in self.limits)])

    @property
    def has_own_memory(self) -> bool:
        """True if arrays are not in the host's memory: evicting them does not help the host."""
        return "total_memory" in self.info

    def lacking_bytes(self) -> int:
        """Return the bytes that other processes are short of, 0 if none; 0 too where it is not known.

        Under a limit it is also what this process and those with it are short of.
        """
        if self.has_own_memory:
            return 0
        lines = kernel_text(self.meminfo).splitlines()
        sizes = {
            name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)
        }
        total = sizes.get("MemTotal", 0)
        rooms = [(total, sizes.get("MemAvailable", total))]
        rooms += [(limit.most_bytes, limit.most_bytes - limit.used_bytes()) for limit in self.limits]
        return max(0, *(int(most * _FREE_SHARE) - free for most, free in rooms))


def this_device() -> Device:
    """Return the device that MLX computes on."""
    info = mx.device_info()
    return Device(str(info.get("device_name", mx.default_device())), info)


def keep_kernels(folder: Path) -> None:
    """Keep the kernels that MLX compiles for a CUDA device, so that a later start has them.

    MLX's own place is the system's temporary folder: empty after each start of the machine, and open to other
    users. The first prompt of a 4-bit model waits 43 s for its kernels (H200), and 0.15 s if they are kept.
    MLX_PTX_CACHE_DIR names another place. Call it before anything is computed.

    Raises:
        OSError: the folder cannot be made.
    """
    if this_device().has_own_memory and not os.environ.get(_KERNELS):
        private_folder(folder)
        os.environ[_KERNELS] = str(folder)


def wire_memory() -> None:
    """Keep weights and caches from being paged out, where MLX has a limit for that (Metal).

    Call it once, before anything is computed: the limit must not change during a computation.
    """
    wanted = mx.device_info().get("max_recommended_working_set_size")
    if wanted is not None:
        mx.set_wired_limit(int(wanted))
