"""Limits of memory that Linux sets to groups of processes: to a container, or to a service of systemd."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from start_llm.core.kernel_files import kernel_text

_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
_CACHED = ("active_file", "inactive_file")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The limit of one group, of which this process is a part."""

    most_bytes: int
    group: Path

    def used_bytes(self) -> int:
        """Return the bytes that the group has, but for files that it has read: the kernel drops those."""
        stat = dict(line.split() for line in kernel_text(self.group / "memory.stat").splitlines())
        cached = sum(int(stat.get(f"total_{name}", stat.get(name, 0))) for name in _CACHED)
        return (_number(self.group, "memory.current", "memory.usage_in_bytes") or 0) - cached


def memory_limits(own_groups: Path = _OWN_GROUPS, groups: Path = _GROUPS) -> Iterator[MemoryLimit]:
    """Find the limits that hold for this process: those of its group, and of all around that.

    Args:
        own_groups: lists the groups of this process. In a container their names may be those of the host.
        groups: has a folder for each group; those of the first version are below `memory`.
    """
    for line in kernel_text(own_groups).splitlines():
        _, controllers, name = (*line.split(":", 2), "", "")[:3]
        if not name or (controllers and "memory" not in controllers.split(",")):
            continue
        outermost = groups / "memory" if controllers else groups
        group = outermost / name.removeprefix("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(outermost):
                most = _number(folder, "memory.max", "memory.limit_in_bytes")
                if most is not None:
                    yield MemoryLimit(most, folder)


def physical_bytes() -> int:
    """Return the size of the host's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _number(group: Path, *names: str) -> int | None:
    """Return the number in the first of these files that has one: a group without a limit states `max`."""
    texts = (kernel_text(group / name) for name in names)
    return next((int(text) for text in texts if text.isdecimal()), None)
