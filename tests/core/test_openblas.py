"""Which commands compute with OpenBLAS, and which BLAS is said to be in use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from start_llm.core import openblas
from start_llm.doctor import machine

ROOT = Path(__file__).resolve().parents[2]
MLX_BLAS = "/env/lib/python3.12/site-packages/mlx_cpu.libs/libblas-bd8a.so.3.10.0"
PRELOADED = "/usr/lib/x/openblas-pthread/libblas.so.3"

# Stands for the command line: says how its process was started.
TELLING = "import os, sys\ndef main(): print(os.environ.get('LD_PRELOAD', ''), *sys.argv[1:])\n"

# As scripts/start_llm calls it.
AS_THE_SCRIPT = (
    "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); "
    "runpy.run_module('start_llm', run_name='__main__')"
)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the program's beginning, whose command line tells what is preloaded."""
    for name in ("__init__.py", "__main__.py", "core/__init__.py", "core/openblas.py"):
        place = tmp_path / "start_llm" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text((ROOT / "start_llm" / name).read_text())
    (tmp_path / "start_llm" / "cli.py").write_text(TELLING)
    return tmp_path


def started(package: Path, *words: str, preload: str | None = None) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    environment = inherited | ({"LD_PRELOAD": preload} if preload else {})
    done = subprocess.run(
        [sys.executable, *words], cwd=package, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


needs_openblas = pytest.mark.skipif(openblas.find_openblas() is None, reason="OpenBLAS is not installed")


@pytest.mark.thorough
@pytest.mark.checked(2)
@needs_openblas
@pytest.mark.parametrize("command", ["serve", "doctor"])
def test_a_command_that_computes_preloads_openblas_however_it_is_called(command: str, package: Path) -> None:
    library = openblas.find_openblas()
    assert started(package, "-m", "start_llm", command, "--x", "a b") == f"{library} {command} --x a b"
    assert started(package, "-I", "-c", AS_THE_SCRIPT, str(package), command) == f"{library} {command}"


@needs_openblas
def test_what_is_preloaded_already_stays_behind_it(package: Path) -> None:
    library = openblas.find_openblas()
    other = str(Path(openblas.__file__).with_name("no-such-library.so"))
    assert started(package, "-m", "start_llm", "serve", preload=other) == f"{library}:{other} serve"
    assert started(package, "-m", "start_llm", "serve", preload=library) == f"{library} serve"


def test_a_client_that_is_launched_inherits_no_library(package: Path) -> None:
    assert started(package, "-m", "start_llm", "launch", "pi") == "launch pi"


@pytest.mark.parametrize(
    ("already", "expected"),
    [
        (None, PRELOADED),
        ("/a.so /b.so", f"{PRELOADED}:/a.so:/b.so"),
        (f"/a.so:{PRELOADED}", f"{PRELOADED}:/a.so"),
    ],
)
def test_openblas_goes_before_what_is_preloaded_already(already: str | None, expected: str) -> None:
    environment = {"HOME": "/h"} | ({"LD_PRELOAD": already} if already else {})
    assert openblas.with_openblas(environment, PRELOADED) == {"HOME": "/h", "LD_PRELOAD": expected}


def test_the_first_openblas_that_is_there_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libblas.so.3").touch()
    places = ["/no/such/library", str(tmp_path / "libblas.so.3")]
    monkeypatch.setattr(sys, "platform", "linux")
    assert openblas.find_openblas(places) == places[1]
    assert openblas.find_openblas(places[:1]) is None
    monkeypatch.setattr(sys, "platform", "darwin")
    assert openblas.find_openblas(places) is None


def test_the_advice_says_what_to_install_and_why() -> None:
    assert "apt install libopenblas0-pthread" in openblas.ADVICE
    assert "30 times" in openblas.ADVICE


@pytest.mark.parametrize(
    ("mapped", "expected"),
    [
        ([MLX_BLAS], MLX_BLAS),
        ([MLX_BLAS, PRELOADED], PRELOADED),
        ([PRELOADED, MLX_BLAS], PRELOADED),
        (["/usr/lib/libc.so.6"], None),
    ],
)
def test_the_blas_in_use_is_the_one_that_answers_first(
    mapped: list[str], expected: str | None, tmp_path: Path
) -> None:
    maps = tmp_path / "maps"
    maps.write_text("".join(f"7f00-7f01 r-xp 00000000 08:01 1234  {path}\n" for path in mapped * 2))
    assert openblas.blas_in_use(maps) == expected
    assert openblas.blas_in_use(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("blas", "verdict", "reported"),
    [
        ("/usr/lib/libopenblasp-r0.3.21.so", "fine", "BLAS libopenblasp-r0.3.21.so"),
        (MLX_BLAS, "look", "OpenBLAS is not preloaded"),
        (None, "look", "OpenBLAS is not preloaded"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="MLX has its own BLAS elsewhere")
def test_the_doctor_says_which_blas_it_measured(
    blas: str | None, verdict: str, reported: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "blas_in_use", lambda: blas)
    finding = machine.device_finding()
    if finding.figures["kind"] != "CPU":
        pytest.skip("computes on a GPU")
    assert (finding.verdict, finding.figures["blas"]) == (verdict, blas and Path(blas).name)
    assert reported in finding.text
