"""The memory that models may use, on each kind of device."""

import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from start_llm.models import device
from start_llm.models.device import Device, keep_kernels, this_device, wire_memory

GIB = 2**30
METAL = {"device_name": "Apple M3 Max", "memory_size": 64 * GIB, "max_recommended_working_set_size": 48 * GIB}
CUDA = {"device_name": "NVIDIA H100", "total_memory": 80 * GIB, "free_memory": 79 * GIB}
CPU = {"device_name": "AMD EPYC", "architecture": "x86_64"}


def meminfo(folder: Path, available_kb: int) -> Path:
    path = folder / "meminfo"
    path.write_text(f"MemTotal:       1000000 kB\nMemFree: 5 kB\nMemAvailable:   {available_kb} kB\n")
    return path


@pytest.mark.parametrize(("info", "usable"), [(METAL, 48 * GIB), (CUDA, 80 * GIB)], ids=["Metal", "CUDA"])
def test_a_gpu_tells_what_models_may_use(info: dict[str, Any], usable: int):
    assert Device("", info).usable_bytes == usable


@pytest.mark.parametrize(("info", "kind"), [(METAL, "Metal"), (CUDA, "CUDA"), (CPU, "CPU")])
def test_the_kind_of_a_device_is_reported(info: dict[str, Any], kind: str):
    assert Device("", info).kind == kind


def test_without_a_gpu_models_may_use_the_memory_of_the_host():
    assert Device("", CPU, limits=()).usable_bytes > 2**28
    assert this_device().usable_bytes > 2**28


@pytest.mark.parametrize("info", [METAL, CPU], ids=["Metal", "CPU"])
def test_what_the_host_lacks_counts_where_arrays_are_in_its_memory(info: dict[str, Any], tmp_path: Path):
    assert Device("", info, meminfo(tmp_path, 30_000), ()).lacking_bytes() == 0
    assert Device("", info, meminfo(tmp_path, 10_000), ()).lacking_bytes() == 20_000 * 1024


def test_what_the_host_lacks_takes_nothing_from_a_card_with_memory_of_its_own(tmp_path: Path):
    assert Device("", CUDA, meminfo(tmp_path, 10)).lacking_bytes() == 0


def test_a_system_that_does_not_tell_lacks_nothing(tmp_path: Path):
    assert Device("", CPU, tmp_path / "none", ()).lacking_bytes() == 0


def test_memory_is_wired_once_up_to_what_metal_recommends(monkeypatch: pytest.MonkeyPatch):
    limits: list[int] = []
    monkeypatch.setattr(device.mx, "device_info", lambda: METAL)
    monkeypatch.setattr(mx, "set_wired_limit", limits.append)
    wire_memory()
    assert limits == [48 * GIB]


@pytest.mark.parametrize("info", [CUDA, CPU], ids=["CUDA", "CPU"])
def test_where_there_is_no_such_limit_nothing_is_wired(info: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device.mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "set_wired_limit", pytest.fail)
    wire_memory()


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: CUDA)
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", "")  # as it was before, once the test is over


@pytest.mark.usefixtures("on_cuda")
def test_kernels_of_a_cuda_device_are_kept_where_nobody_else_writes(tmp_path: Path):
    keep_kernels(tmp_path / "state" / "kernels")
    assert os.environ["MLX_PTX_CACHE_DIR"] == str(tmp_path / "state" / "kernels")
    assert (tmp_path / "state" / "kernels").stat().st_mode & 0o777 == 0o700


@pytest.mark.usefixtures("on_cuda")
def test_kernels_are_kept_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", "/elsewhere")
    keep_kernels(tmp_path / "kernels")
    assert os.environ["MLX_PTX_CACHE_DIR"] == "/elsewhere"
    assert not (tmp_path / "kernels").exists()


@pytest.mark.usefixtures("on_cuda")
def test_a_folder_of_kernels_that_cannot_be_made_is_reported(tmp_path: Path):
    (tmp_path / "kernels").write_text("a file")
    with pytest.raises(NotADirectoryError):
        keep_kernels(tmp_path / "kernels")
    assert not os.environ["MLX_PTX_CACHE_DIR"]


def test_where_nothing_is_compiled_no_folder_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mx, "device_info", lambda: METAL)
    keep_kernels(tmp_path / "kernels")
    assert not list(tmp_path.iterdir())
