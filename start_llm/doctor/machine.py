"""Examine the machine: its device, its memory, the ports, and the files that are cached on the disk."""

import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from start_llm.cache.disk.disk_maintenance import report
from start_llm.config.paths import disk_tier_folder, from_root
from start_llm.config.settings import Settings
from start_llm.core.openblas import blas_in_use
from start_llm.doctor.findings import Figure, Finding
from start_llm.models.device import this_device
from start_llm.proxy.ports import is_free, owner
from start_llm.wiring.memory_plan import memory_budget

_PACKAGES = ("mlx", "mlx-lm", "mlx-vlm", "litellm")
_LEAST_FREE_DISK = 5 * 2**30
_GIB = 2**30


def examine_machine(settings: Settings) -> Iterator[Finding]:
    """Yield findings that need no model."""
    yield device_finding()
    yield _memory(settings)
    yield from _ports(settings)
    yield _disk_space(settings)
    folder = disk_tier_folder(settings.ssd.folder, settings.server.state_root)
    if folder and settings.cache.is_on:
        yield _cached_files(folder)


def device_finding() -> Finding:
    """Say what MLX computes on, with the versions of what it computes with."""
    device = this_device()
    packages = {name: _version(name) for name in _PACKAGES}
    figures: dict[str, Figure] = {
        "kind": device.kind,
        "name": device.name,
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        **packages,
    }
    text = f"{device.kind} ({device.name}), {figures['system']}, MLX {packages['mlx']}"
    if device.kind != "CPU" or platform.system() != "Linux":
        return Finding("device", "fine", text, figures)
    return _with_blas(text, figures)


def _with_blas(text: str, figures: Mapping[str, Figure]) -> Finding:
    """Say which BLAS all that follows is measured with."""
    blas = blas_in_use()
    name = blas and Path(blas).resolve().name
    if name is None or "openblas" not in name:
        text += "; OpenBLAS is not preloaded, and models compute many times slower: see docs/install.md"
        return Finding("device", "look", text, {**figures, "blas": name})
    return Finding("device", "fine", f"{text}, BLAS {name}", {**figures, "blas": name})


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _memory(settings: Settings) -> Finding:
    device, budget = this_device(), memory_budget(settings)
    lacking = device.lacking_bytes()
    figures = {"usable_bytes": device.usable_bytes, "budget_bytes": budget, "lacking_bytes": lacking}
    text = f"{budget / _GIB:.1f} of {device.usable_bytes / _GIB:.1f} GiB are for the server"
    if budget > device.usable_bytes:
        return Finding("memory", "fault", f"{text}: MEMORY_BUDGET is more than there is", figures)
    if lacking:
        text += f"; other programs use so much that {lacking / _GIB:.1f} GiB are missing"
        return Finding("memory", "look", text, figures)
    return Finding("memory", "fine", text, figures)


def _ports(settings: Settings) -> Iterator[Finding]:
    wanted = {"MLX_PORT": settings.server.port}
    if settings.proxy.is_on:
        wanted["PROXY_PORT"] = settings.proxy.port
    for name, port in wanted.items():
        figures = {"variable": name, "port": port}
        if port == 0 or is_free(port):
            yield Finding("port", "fine", f"{name}={port} is free", figures)
            continue
        holder = owner(port)
        who = f"process {holder.pid}" if holder else "another process"
        yield Finding("port", "look", f"{name}={port} is taken by {who}: the server would not start", figures)


def _disk_space(settings: Settings) -> Finding:
    tier = disk_tier_folder(settings.ssd.folder, settings.server.state_root)
    free = shutil.disk_usage(_existing(tier or from_root(settings.server.state_root))).free
    text = f"{free / _GIB:.0f} GiB are free"
    return Finding("disk", "fine" if free >= _LEAST_FREE_DISK else "look", text, {"free_bytes": free})


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _cached_files(folder: Path) -> Finding:
    """Read every cached file of the user, and change none."""
    try:
        cache = report(folder, verifies=True)
    except FileNotFoundError:
        return Finding("cached files", "fine", "none yet")
    except OSError as error:
        return Finding("cached files", "fault", f"SSD_CACHE_DIR cannot be read: {error.strerror}")
    unusable = len(cache.unusable)
    figures = {"files": cache.files.total(), "bytes": cache.nbytes.total(), "hurt": unusable}
    if unusable:
        reason = next(iter(cache.unusable.values()))
        text = (
            f"{unusable:,} of {figures['files']:,} files are damaged ({reason}): the server will read "
            "their conversations again, and the disk deserves a look"
        )
        return Finding("cached files", "fault", text, figures)
    return Finding("cached files", "fine", f"{figures['files']:,} files, each as it was written", figures)
