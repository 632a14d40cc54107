"""In a container, or a service with a limit, the memory is that of the limit and not the host's."""

from __future__ import annotations

from pathlib import Path

import pytest

from start_llm.models.device import Device
from start_llm.models.memory_limits import MemoryLimit, memory_limits

MIB = 2**20
CPU = {"device_name": "AMD EPYC"}


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def limits_of(folder: Path, own: str) -> list[MemoryLimit]:
    (folder / "own").write_text(own)
    return [*memory_limits(folder / "own", folder / "cgroup")]


def service(folder: Path, used: int, cached: int = 0) -> list[MemoryLimit]:
    """The limit of a service of systemd, in which something computes: 100 MiB."""
    stat = f"anon {used - cached}\nactive_file 0\ninactive_file {cached}"
    group = folder / "cgroup" / "system.slice" / "start.service"
    write(group, memory__max=100 * MIB, memory__current=used, memory__stat=stat)
    write(group.parent, memory__max="max")
    return limits_of(folder, "0::/system.slice/start.service\n")


def test_a_limit_is_the_memory_that_models_may_use(tmp_path: Path):
    assert Device("", CPU, limits=service(tmp_path, 0)).usable_bytes == 100 * MIB
    assert Device("", CPU, limits=[]).usable_bytes > 100 * MIB


def test_of_several_limits_the_least_counts(tmp_path: Path):
    write(tmp_path / "cgroup" / "a" / "b", memory__max=70 * MIB)
    write(tmp_path / "cgroup" / "a", memory__max=50 * MIB)
    limits = limits_of(tmp_path, "0::/a/b\n")
    assert Device("", CPU, limits=limits).usable_bytes == 50 * MIB


def test_a_container_that_sees_its_own_group_as_the_root_has_its_limit(tmp_path: Path):
    write(tmp_path / "cgroup", memory__max=100 * MIB)
    for own in ("0::/\n", "0::/docker/0123abc\n", "0::/../other\n"):
        assert [limit.most_bytes for limit in limits_of(tmp_path, own)] == [100 * MIB]


def test_a_limit_of_the_first_version_counts_too(tmp_path: Path):
    group = tmp_path / "cgroup" / "memory"
    stat = "total_active_file 1048576\ntotal_inactive_file 2097152"
    sizes = {"memory__limit_in_bytes": 100 * MIB, "memory__usage_in_bytes": 99 * MIB}
    write(group, **sizes, memory__stat=stat)
    (limit,) = limits_of(tmp_path, "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n1:name=systemd:/x\n")
    assert (limit.most_bytes, limit.used_bytes()) == (100 * MIB, 96 * MIB)


@pytest.mark.parametrize(("used", "cached", "lacking"), [(90, 0, 0), (99, 0, 2), (99, 9, 0), (100, 0, 3)])
def test_what_a_group_is_short_of_is_lacking(used: int, cached: int, lacking: int, tmp_path: Path):
    """Files that it has read do not count: the kernel drops them."""
    limits = service(tmp_path, used * MIB, cached * MIB)
    assert Device("", CPU, tmp_path / "none", limits).lacking_bytes() == lacking * MIB


def test_a_group_that_says_nothing_of_its_memory_lacks_nothing(tmp_path: Path):
    limits = service(tmp_path, 100 * MIB)
    for path in (tmp_path / "cgroup").rglob("memory.*"):
        path.unlink()
    assert Device("", CPU, tmp_path / "none", limits).lacking_bytes() == 0


@pytest.mark.parametrize("own", ["", "no line of this form\n", "0::/nowhere\n"])
def test_where_no_limit_is_known_there_is_none(own: str, tmp_path: Path):
    assert limits_of(tmp_path, own) == []
    assert [*memory_limits(tmp_path / "none", tmp_path / "cgroup")] == []
