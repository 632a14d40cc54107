#!/usr/bin/env python3
"""Install start_llm into .venv beside this file, then start the server (or, with --test, its tests).

This file needs only the standard library and Python 3.9 or newer. The server itself runs on Python 3.12.

    1. refuse a .venv that another Python has changed   (names each artefact, deletes nothing)
    2. install what is missing: find a Python 3.12, make .venv, run pip
       (skipped while the stamps in .venv are current: a second start uses no network)
    3. become the server through exec                   (on Linux with OpenBLAS preloaded)
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
REQUIREMENT_FILES = {"server": ROOT / "requirements.txt", "dev": ROOT / "requirements-dev.txt"}
CONSTRAINTS = ROOT / "constraints.txt"  # the exact version of every package, dependencies included
INSTALLED_WITHOUT_DEPENDENCIES = "mlx-vlm"
CURE = "Delete the folder (rm -rf .venv) and run this again; it is then made anew."

HOW_TO_GET_PYTHON = """\
start_llm needs Python 3.12, and none was found. One of these brings it; then run this again:
    uv python install 3.12              with uv (https://docs.astral.sh/uv)
    pyenv install 3.12                  with pyenv (https://github.com/pyenv/pyenv)
    brew install python@3.12            macOS with Homebrew
    apt install python3.12-venv         Ubuntu 24.04"""

WHOLE_SUITE = [
    "-n",
    "2",
    "--dist",
    "loadfile",
]  # two processes; the tests of one file run in one process and share their fixtures

# Paths of an OpenBLAS with threads and the cblas names: on Debian and Ubuntu, on Fedora, on Arch.
OPENBLAS_PLACES = (
    f"/usr/lib/{platform.machine()}-linux-gnu/openblas-pthread/libblas.so.3",
    "/usr/lib64/libopenblasp.so.0",
    "/usr/lib/libopenblas.so.0",
)
OPENBLAS_ADVICE = """\
note: OpenBLAS is missing. It makes float32 on the CPU about 30 times faster than the BLAS in MLX's wheel:
      apt install libopenblas0-pthread    (Fedora: dnf install openblas-threads, Arch: pacman -S openblas)"""


class Refusal(Exception):
    """A reason to stop, worded for the user. Ends the program with status 1."""


def main(arguments: list[str]) -> int:
    try:
        run(arguments)
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped. Run the same command to go on from here.", file=sys.stderr)
        return 130
    return 0


def run(arguments: list[str]) -> None:
    """Install, then become the server or the tests. Returns only with --setup-only."""
    own_arguments, pytest_arguments = split_at_test(arguments)
    options, server_arguments = option_parser().parse_known_args(own_arguments)
    refuse_windows(sys.platform)
    ensure_installed(["server", "dev"] if options.dev or pytest_arguments is not None else ["server"])
    if options.setup_only:
        say(f"Ready: {VENV}")
    elif pytest_arguments is not None:
        os.environ.setdefault(
            "OPENBLAS_NUM_THREADS", "1"
        )  # the models in tests are tiny; more threads only wait for each other
        become(["-m", "pytest", *(pytest_arguments or WHOLE_SUITE)])
    else:
        become(["-m", "start_llm", "serve", *serve_options(options), *server_arguments])


def say(text: str) -> None:
    print(text, flush=True)  # so that it comes before the output of pip or the server


# --- options -----------------------------------------------------------------


def split_at_test(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    """Split off the arguments after --test, which all go to pytest; None if there is no --test."""
    if "--test" not in arguments:
        return arguments, None
    place = arguments.index("--test")
    return arguments[:place], arguments[place + 1 :]


def option_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="install_and_run.py",
        description="Install start_llm into .venv, then start its server. Only the first start installs.",
        epilog="All other options go to the server: see .venv/bin/python -m start_llm serve --help",
        allow_abbrev=False,
    )
    values = parser.add_argument_group("for the server")
    values.add_argument("--model", metavar="PATH_OR_REPO", help="a model folder, or a repository to download")
    values.add_argument(
        "--model-dir", metavar="FOLDER", help="a folder with one model, or with the one --model names"
    )
    values.add_argument("--demo", action="store_true", help="serve the small demo model of this repository")
    values.add_argument("--no-proxy", action="store_true", help="the server alone, without the LiteLLM proxy")
    values.add_argument("--mlx-port", "--port", metavar="N", help="port of the server")
    values.add_argument("--proxy-port", metavar="N", help="port of the LiteLLM proxy")
    stages = parser.add_argument_group("instead of starting the server")
    stages.add_argument("--setup-only", action="store_true", help="install, then stop")
    stages.add_argument("--dev", action="store_true", help="install requirements-dev.txt as well")
    stages.add_argument(
        "--test", action="store_true", help="run pytest with all arguments that follow, or all tests"
    )
    return parser


def serve_options(options: argparse.Namespace) -> list[str]:
    flags = [flag for flag, on in (("--no-proxy", options.no_proxy), ("--demo", options.demo)) if on]
    values = (
        ("--model", options.model and absolute_if_it_exists(options.model)),
        ("--model-dir", options.model_dir and absolute_if_it_exists(options.model_dir)),
        ("--mlx-port", options.mlx_port),
        ("--proxy-port", options.proxy_port),
    )
    return flags + [word for name, value in values if value is not None for word in (name, value)]


def absolute_if_it_exists(model: str) -> str:
    """Make the path of an existing model absolute, because the server runs in the repository's root."""
    path = Path(model).expanduser()
    return str(path.absolute()) if path.exists() else model


def refuse_windows(system: str) -> None:
    if system in ("win32", "cygwin"):
        raise Refusal("Windows is not supported: MLX runs on macOS and Linux. Use a Linux inside WSL 2.")


# --- a Python 3.12 -----------------------------------------------------------

PROBE = "import os, sys; print('%d.%d' % sys.version_info[:2], os.uname()[4], sys.executable)"


class Interpreter(NamedTuple):
    """The result of running a candidate Python; `complaint` is empty if it can be used."""

    executable: str
    complaint: str


def probe(python: str) -> Interpreter:
    # -S skips site-packages: a .pth file there runs code at every start of its Python, and may be malicious.
    done = quietly([python, "-I", "-S", "-c", PROBE])
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[0]
        return Interpreter(python, f"does not run ({reason})")
    version, machine, executable = [*done.stdout.strip().split(" ", 2), "", "", ""][:3]
    return Interpreter(executable, complaint_about(version, machine, sys.platform))


def quietly(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, returncode=126, stdout="", stderr=str(error))


def complaint_about(version: str, machine: str, system: str) -> str:
    if version != "3.12":
        return f"is Python {version}"
    if system == "darwin" and machine != "arm64":
        return f"runs as {machine} (an Intel Mac, or Rosetta); MLX needs arm64"
    return ""


def find_python() -> str:
    refused: dict[str, str] = {}
    for candidate in python_candidates():
        if candidate in refused or VENV in Path(candidate).parents:
            continue
        interpreter = probe(candidate)
        if not interpreter.complaint:
            return interpreter.executable
        refused[candidate] = interpreter.complaint
    tried = "".join(f"\n    {candidate} {complaint}" for candidate, complaint in refused.items())
    raise Refusal(f"{HOW_TO_GET_PYTHON}\nTried:{tried}" if tried else HOW_TO_GET_PYTHON)


def python_candidates() -> Iterator[str]:
    yield sys.executable
    for folder in os.get_exec_path():
        if Path(folder, "python3.12").is_file():
            yield str(Path(folder, "python3.12"))
    pyenv_root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from newest_first(pyenv_root.glob("versions/3.12*/bin/python"))
    yield from uv_pythons()
    if sys.platform == "darwin":
        for prefix in ("/opt/homebrew", "/usr/local", "/Library/Frameworks/Python.framework/Versions/3.12"):
            yield from newest_first(Path(prefix).glob("bin/python3.12"))
            yield from newest_first(Path(prefix).glob("opt/python@3.12/bin/python3.12"))


def uv_pythons() -> Iterator[str]:
    uv = shutil.which("uv")
    if uv:
        yield from quietly([uv, "python", "find", "3.12"]).stdout.splitlines()[:1]
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    managed = Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or data / "uv" / "python")
    yield from newest_first(managed.glob("cpython-3.12*/bin/python3.12"))


def newest_first(pythons: Iterable[Path]) -> list[str]:
    def version(python: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", python.split("3.12", 1)[1])]

    return sorted((str(python) for python in pythons), key=version, reverse=True)


# --- preflight ---------------------------------------------------------------


def refuse_contamination() -> None:
    # Artefacts that can be read are checked first, so that a malicious or foreign Python is not started.
    artefacts = [*wrong_configuration(), *foreign_files(), *poisoned_files()] or wrong_interpreters()
    if artefacts:
        named = "".join(f"\n    {artefact}" for artefact in artefacts)
        raise Refusal(f"{VENV} is not a clean environment of Python 3.12:{named}\n{CURE}")


def wrong_configuration() -> Iterator[str]:
    if VENV.exists() and not VENV.is_dir():
        yield ".venv is not a folder"
    version = re.search(r"^version(?:_info)?\s*=\s*(\S+)", configuration(), re.MULTILINE)
    if version and not re.match(r"3\.12(\.|$)", version.group(1)):
        yield f"pyvenv.cfg says Python {version.group(1)}"


def configuration() -> str:
    file = VENV / "pyvenv.cfg"
    return file.read_text(errors="replace") if file.is_file() else ""


def foreign_files() -> Iterator[str]:
    for library in sorted(VENV.glob("lib/python*")):
        if library.name != "python3.12":
            yield f"lib/{library.name}/ belongs to another Python"
    for program in sorted(VENV.glob("bin/*")):
        versioned = re.fullmatch(r"(?:python|pip)(\d\.\d+)", program.name)
        if versioned and versioned.group(1) != "3.12":
            yield f"bin/{program.name} belongs to another Python"
        elif program.is_symlink() and not program.exists():
            yield f"bin/{program.name} is a dead link to {program.readlink()}"


def poisoned_files() -> Iterator[str]:
    """Find .pth files of LiteLLM. Version 1.82.8, published with stolen credentials, ran code from one."""
    for file in sorted(VENV.glob("lib/python*/site-packages/litellm*.pth")):
        yield f"{file.relative_to(VENV)} runs code in every start of Python here (as in LiteLLM 1.82.8)"


def wrong_interpreters() -> list[str]:
    names = ("python3.12", "python3", "python")
    distinct = {(VENV / "bin" / name).resolve(): name for name in names if (VENV / "bin" / name).is_file()}
    probed = {name: probe(str(VENV / "bin" / name)) for name in distinct.values()}
    return [f"bin/{name} {found.complaint}" for name, found in probed.items() if found.complaint]


# --- installation ------------------------------------------------------------


def ensure_installed(parts: list[str]) -> None:
    refuse_contamination()
    if all(is_installed(part) for part in parts):
        return
    with installation_lock():
        refuse_contamination()
        if not all(is_installed(part) for part in parts):
            install(parts)


def is_installed(part: str) -> bool:
    return VENV_PYTHON.exists() and stamp(part).is_file() and stamp(part).read_text() == fingerprint(part)


def stamp(part: str) -> Path:
    return VENV / f".installed-{part}"


def fingerprint(part: str) -> str:
    """Return a digest of the requirements (without comments), the constraints and pyvenv.cfg.

    pyvenv.cfg names the interpreter.
    """
    content = json.dumps([part, requirement_lines(part), lines_of(CONSTRAINTS), configuration()])
    return hashlib.sha256(content.encode()).hexdigest()


def requirement_lines(part: str) -> list[str]:
    return lines_of(REQUIREMENT_FILES[part])


def lines_of(file: Path) -> list[str]:
    """Return the non-empty lines of a file, without comments."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise Refusal(f"Cannot read {file}: {error.strerror}. Is this a whole copy of start_llm?") from error
    lines = (re.split(r"(?:^|\s)#", line)[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


@contextlib.contextmanager
def installation_lock() -> Generator[None]:
    import fcntl  # does not exist on Windows, where this file must still print its refusal

    try:
        VENV.mkdir(exist_ok=True)
        file = (VENV / ".lock").open("w")
    except OSError as error:
        raise Refusal(f"Cannot write to {VENV}: {error.strerror}. It installs only there.") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another start is installing here; waiting for it to finish.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def install(parts: list[str]) -> None:
    for part in REQUIREMENT_FILES:
        stamp(part).unlink(missing_ok=True)  # if a step fails from here on, the next start installs again
    make_environment()
    lines = [line for part in parts for line in requirement_lines(part)]
    lonely = [line for line in lines if line.startswith(INSTALLED_WITHOUT_DEPENDENCIES)]
    files = " and ".join(REQUIREMENT_FILES[part].name for part in parts)
    say(f"Installing {files}: about 1 GB, some minutes the first time.")
    pip_install("the requirements", [line for line in lines if line not in lonely])
    pip_install(INSTALLED_WITHOUT_DEPENDENCIES, ["--no-deps", *lonely])
    for part in parts:
        stamp(part).write_text(fingerprint(part))


def make_environment() -> None:
    if not (VENV_PYTHON.exists() and configuration()):
        python = find_python()
        say(f"Making {VENV} with {python}")
        hint = "On Debian and Ubuntu venv is a package of its own: apt install python3.12-venv."
        run_step("Making the environment", [python, "-m", "venv", str(VENV)], hint)
    packages = VENV / "lib" / "python3.12" / "site-packages"
    if not any(packages.glob("pip-*.dist-info/RECORD")):  # RECORD is written last
        for half in (packages / "pip", *packages.glob("pip-*.dist-info")):
            shutil.rmtree(half, ignore_errors=True)
        hint = f"This environment has no pip. {CURE}"
        run_step("Adding pip to the environment", [str(VENV_PYTHON), "-m", "ensurepip"], hint)


def pip_install(what: str, requirements: list[str]) -> None:
    pip = [str(VENV_PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    pip += ["--constraint", CONSTRAINTS.name]
    hint = "If a download failed: check the network and pip's settings, then run the same command again."
    run_step(f"Installing {what}", [*pip, *requirements], hint)


def run_step(step: str, command: list[str], hint: str) -> None:
    status = subprocess.call(command, stdin=subprocess.DEVNULL, cwd=ROOT)
    if status != 0:
        raise Refusal(f"\n{step} failed with status {status}; the reason is printed above.\n{hint}")


# --- the server --------------------------------------------------------------


def become(arguments: list[str]) -> NoReturn:
    environment = dict(os.environ)
    if sys.platform == "linux":
        preload_openblas(environment, OPENBLAS_PLACES)
    os.chdir(ROOT)
    os.execve(VENV_PYTHON, [str(VENV_PYTHON), *arguments], environment)


def preload_openblas(environment: dict[str, str], places: Iterable[str]) -> None:
    library = next((place for place in places if Path(place).is_file()), None)
    if library is None:
        say(OPENBLAS_ADVICE)
        return
    preloaded = re.split(r"[: ]+", environment.get("LD_PRELOAD", ""))
    others = [other for other in preloaded if other not in ("", library)]
    environment["LD_PRELOAD"] = ":".join([library, *others])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
