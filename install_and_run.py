#!/usr/bin/env python3
"""Install start_llm into .venv beside this file, then start the server (or, with --test, its tests).

This file needs only the standard library and Python 3.9 or newer. The server itself runs on Python 3.12.

    1. read the options, and refuse unknown ones
    2. refuse a .venv that another Python has changed   (names each artefact, deletes nothing)
    3. install what is missing: find a Python 3.12, make .venv, run uv, or pip where there is no uv
       (skipped while the stamps in .venv are current: a second start uses no network)
    4. become the server through exec                   (on Linux with OpenBLAS preloaded)

What the tools print goes to logs/install.log; its end is shown if a step fails.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import hashlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
REQUIREMENT_FILES = {"server": ROOT / "requirements.txt", "dev": ROOT / "requirements-dev.txt"}
CONSTRAINTS = ROOT / "constraints.txt"  # the exact version of every package, dependencies included
HASHES = (
    ROOT / "hashes.txt"
)  # the same packages, with what a file of each must be; scripts/hash_packages.py makes it
LOG = ROOT / "logs" / "install.log"
ONLY_WHAT_IS_HASHED = ("--require-hashes", "--no-deps", "--requirement")  # a file follows
BACKENDS = ("cpu", "cuda12", "cuda13")
LAST_LINES = 12
NEEDED_BYTES = {"cpu": 2_000_000_000, "cuda12": 6_000_000_000, "cuda13": 6_000_000_000}
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

OPENBLAS = ROOT / "start_llm" / "core" / "openblas.py"


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
    refuse_unknown(server_arguments)
    parts = ["server", "dev"] if options.dev or pytest_arguments is not None else ["server"]
    ensure_installed(parts, options.backend)
    if options.setup_only:
        say(f"Ready: {VENV}")
    elif pytest_arguments is not None:
        os.environ.setdefault(
            "OPENBLAS_NUM_THREADS", "1"
        )  # the models in tests are tiny; more threads only wait for each other
        keep_bytecode_of_tests()
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
    values.add_argument(
        "--model",
        metavar="PATH_OR_REPO",
        action="append",
        default=[],
        help="a model folder, or a repository to download; repeat it for more models",
    )
    values.add_argument(
        "--model-dir", metavar="FOLDER", help="a folder with one model, or with the one --model names"
    )
    values.add_argument("--demo", action="store_true", help="serve the small demo model of this repository")
    values.add_argument("--no-proxy", action="store_true", help="the server alone, without the LiteLLM proxy")
    values.add_argument("--mlx-port", "--port", metavar="N", help="port of the server")
    values.add_argument("--proxy-port", metavar="N", help="port of the LiteLLM proxy")
    values.add_argument(
        "--backend",
        choices=BACKENDS,
        help="MLX's build for Linux; by default the one for this machine",
    )
    stages = parser.add_argument_group("instead of starting the server")
    stages.add_argument("--version", action="version", version=f"start_llm {own_version()}")
    stages.add_argument("--setup-only", action="store_true", help="install, then stop")
    stages.add_argument("--dev", action="store_true", help="install requirements-dev.txt as well")
    stages.add_argument(
        "--test", action="store_true", help="run pytest with all arguments that follow, or all tests"
    )
    return parser


def serve_options(options: argparse.Namespace) -> list[str]:
    flags = [flag for flag, on in (("--no-proxy", options.no_proxy), ("--demo", options.demo)) if on]
    values = (
        *(("--model", absolute_if_it_exists(model)) for model in options.model),
        ("--model-dir", options.model_dir and absolute_if_it_exists(options.model_dir)),
        ("--mlx-port", options.mlx_port),
        ("--proxy-port", options.proxy_port),
    )
    return flags + [word for name, value in values if value is not None for word in (name, value)]


def own_version() -> str:
    text = (ROOT / "start_llm" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"', text, re.MULTILINE)
    return found.group(1) if found else "of unknown version"


def refuse_unknown(arguments: list[str]) -> None:
    """Refuse options that the server does not have, before anything is installed for it."""
    known = [*re.findall(r"--[a-z-]+", option_parser().format_help()), *server_flags()]
    for argument in arguments:
        name = argument.partition("=")[0]
        if name.startswith("--") and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise Refusal(f"There is no option {name}." + (f" Did you mean {close[0]}?" if close else ""))


def server_flags() -> list[str]:
    """Return the options of the server, read from its source, which this Python may not be able to run."""
    settings, launch = (
        (ROOT / "start_llm" / path).read_text(encoding="utf-8")
        for path in ("config/flags.py", "commands/rank_launch.py")
    )
    return re.findall(r'"(--[a-z][a-z-]*)"', settings) + re.findall(r'add_argument\(\s*"(--[a-z-]+)"', launch)


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


def quietly(command: list[str], timeout: float = 30) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, returncode=126, stdout="", stderr=str(error))


def complaint_about(version: str, machine: str, system: str) -> str:
    if version != "3.12":
        return f"is Python {version}"
    if system == "darwin" and machine != "arm64":
        return f"runs as {machine} (an Intel Mac, or Rosetta); MLX needs arm64"
    return ""


def find_or_bring_python() -> str:
    """Return a Python 3.12; one that uv downloads if there is none.

    Raises:
        Refusal: there is none, and uv cannot download one.
    """
    try:
        return find_python()
    except Refusal:
        with tempfile.TemporaryDirectory() as folder:
            uv = usable_uv(shutil.which("uv")) or usable_uv(uv_in(folder))
            if uv is None or quietly([uv, "python", "install", "3.12"], timeout=600).returncode != 0:
                raise
            return find_python()


def uv_in(folder: str) -> str:
    """Install uv into a folder with the Python that runs this. Returns where it is if that went well."""
    quietly([sys.executable, "-m", "venv", folder], timeout=120)
    package = write_packages(["uv"], Path(folder, "uv.txt"))
    pip = [str(Path(folder, "bin", "python")), "-m", "pip", "install", "--quiet"]
    quietly([*pip, *ONLY_WHAT_IS_HASHED, package], timeout=300)
    return str(Path(folder, "bin", "uv"))


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


def ensure_installed(parts: list[str], backend: str | None) -> None:
    """Install what is missing.

    Args:
        backend: MLX's build for Linux; None is the one that is there, or the one for this machine.
    """
    refuse_contamination()
    if all(is_installed(part) for part in parts) and backend in (None, installed_backend()):
        return
    with installation_lock():
        refuse_contamination()
        there = installed_backend()
        if there and backend not in (None, there):
            raise Refusal(f"{VENV} has MLX for {there}, and two builds overwrite each other's files.\n{CURE}")
        if not all(is_installed(part) for part in parts):
            install(parts, there or backend or detected_backend())


def installed_backend() -> str | None:
    """Return the build of MLX that the environment has, or is about to have; None if there is none."""
    file = VENV / ".backend"
    if file.is_file():
        return file.read_text()
    return "cpu" if any(stamp(part).is_file() for part in REQUIREMENT_FILES) else None


def detected_backend() -> str:
    """Return the build of MLX for this machine's NVIDIA driver, if it has one."""
    if sys.platform != "linux":
        return "cpu"
    found = re.search(r"CUDA Version: (\d+)", quietly(["nvidia-smi"]).stdout)
    version = int(found.group(1)) if found else 0
    return "cuda13" if version >= 13 else "cuda12" if version == 12 else "cpu"


def is_installed(part: str) -> bool:
    return VENV_PYTHON.exists() and stamp(part).is_file() and stamp(part).read_text() == fingerprint(part)


def stamp(part: str) -> Path:
    return VENV / f".installed-{part}"


def fingerprint(part: str) -> str:
    """Return a digest of the requirements (without comments), the hashes and pyvenv.cfg.

    pyvenv.cfg names the interpreter.
    """
    content = json.dumps([part, requirement_lines(part), lines_of(HASHES), configuration()])
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
        file = (VENV / ".installing").open("w")  # uv locks .lock itself, and would wait for us
    except OSError as error:
        raise Refusal(f"Cannot write to {VENV}: {error.strerror}. It installs only there.") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another start is installing here; waiting for it to finish.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def install(parts: list[str], backend: str) -> None:
    refuse_full_disk(NEEDED_BYTES[backend])
    for part in REQUIREMENT_FILES:
        stamp(part).unlink(missing_ok=True)  # if a step fails from here on, the next start installs again
    make_environment()
    (VENV / ".backend").write_text(backend)
    packages = write_packages([*parts, backend], VENV / ".packages.txt")
    began = time.monotonic()
    say(f"Packages  installing (about 1 GB, MLX for {backend}); details in {LOG.relative_to(ROOT)}")
    tool = install_packages(packages)
    for part in parts:
        stamp(part).write_text(fingerprint(part))
    say(f"Packages  installed with {tool} in {time.monotonic() - began:.0f} s")


def refuse_full_disk(needed: int) -> None:
    free = shutil.disk_usage(ROOT).free
    if free < needed:
        raise Refusal(
            f"The packages need {needed / 1e9:.0f} GB; on the disk of {ROOT} {free / 1e9:.1f} GB are free."
        )


def make_environment() -> None:
    if not (VENV_PYTHON.exists() and configuration()):
        python = find_or_bring_python()
        say(f"Python    {python}")
        hint = "On Debian and Ubuntu venv is a package of its own: apt install python3.12-venv."
        run_step("Making the environment", [python, "-m", "venv", str(VENV)], hint)
    packages = VENV / "lib" / "python3.12" / "site-packages"
    if not any(packages.glob("pip-*.dist-info/RECORD")):  # RECORD is written last
        for half in (packages / "pip", *packages.glob("pip-*.dist-info")):
            shutil.rmtree(half, ignore_errors=True)
        hint = f"This environment has no pip. {CURE}"
        run_step("Adding pip to the environment", [str(VENV_PYTHON), "-m", "ensurepip"], hint)


def write_packages(sections: list[str], file: Path) -> str:
    """Write these sections of `HASHES` into a file, and return its name for the tools."""
    try:
        text = HASHES.read_text(encoding="utf-8")
    except OSError as error:
        raise Refusal(
            f"Cannot read {HASHES}: {error.strerror}. Is this a whole copy of start_llm?"
        ) from error
    parts = re.split(r"^# \[(\w+)\]$", text, flags=re.MULTILINE)
    found = dict(zip(parts[1::2], parts[2::2]))
    file.write_text("".join(found[section] for section in sections), encoding="utf-8")
    return str(file)


def install_packages(packages: str) -> str:
    """Install exactly the packages of a file, if they have its hashes. Returns the name of the tool.

    uv does it, or pip if uv cannot. Neither looks at what a package requires: the file has it all.
    """
    uv = find_uv()
    if uv:
        settings = pip_settings()
        command, environment = uv_install(uv, settings), uv_environment(settings)
        try:
            run_step("Installing with uv", [*command, packages], "", environment)
        except Refusal:
            say("Packages  uv cannot install them; pip does it, which takes some minutes")
        else:
            return "uv"
    hint = "If a download failed: check the network and pip's settings, then run the same command again."
    run_step("Installing the requirements", [*pip_install(), packages], hint)
    return "pip"


def pip_install() -> list[str]:
    pip = [str(VENV_PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    return [*pip, *ONLY_WHAT_IS_HASHED]


def find_uv() -> str | None:
    """Return uv: the user's, or one that pip brings into the environment; None if there is none."""
    own = str(VENV / "bin" / "uv")
    found = usable_uv(shutil.which("uv")) or usable_uv(own)
    if found is None:
        log(quietly([*pip_install(), write_packages(["uv"], VENV / ".uv.txt")], timeout=300).stdout)
    return found or usable_uv(own)


def usable_uv(program: str | None) -> str | None:
    if program is None:
        return None
    done = quietly([program, "--version"])
    return program if done.returncode == 0 and done.stdout.startswith("uv ") else None


def uv_install(uv: str, settings: list[tuple[str, str]]) -> list[str]:
    """Return the command that installs from where pip would: uv does not read pip's settings."""
    command = [uv, "pip", "install", "--python", str(VENV_PYTHON)]
    for name, value in settings:
        if name == "index-url":
            command += ["--default-index", value]
        elif name == "extra-index-url":
            command += ["--index-strategy", "unsafe-best-match"]  # as pip: the best version of all of them
            command += [word for url in value.split() for word in ("--index", url)]
        elif name == "find-links":
            command += [word for place in value.split() for word in ("--find-links", place)]
        elif name == "no-index" and value.lower() in ("1", "true", "yes", "on"):
            command += ["--no-index"]
    return [*command, *ONLY_WHAT_IS_HASHED]


def uv_environment(settings: list[tuple[str, str]]) -> dict[str, str]:
    names = {"cert": "SSL_CERT_FILE", "proxy": "ALL_PROXY"}
    found = {names[name]: value for name, value in settings if name in names}
    return {**os.environ, **found}


def pip_settings() -> list[tuple[str, str]]:
    """Return what pip's files and variables set, each name once: a later one replaces an earlier one."""
    listed = quietly([str(VENV_PYTHON), "-m", "pip", "config", "list"]).stdout
    found = re.findall(r"^[^\s=]*\.([a-z-]+)='(.*)'$", listed.replace("\\n", " "), re.MULTILINE)
    return list(dict(reversed(found)).items())


def run_step(step: str, command: list[str], hint: str, environment: dict[str, str] | None = None) -> None:
    """Run a tool, whose output goes to the log.

    Raises:
        Refusal: it failed. Says how its output ends.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        status = subprocess.call(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=ROOT, env=environment
        )
        output.seek(0)
        text = output.read()
    log(f"$ {' '.join(command)}\n{text}")
    if status != 0:
        end = "\n".join(text.splitlines()[-LAST_LINES:])
        raise Refusal(f"{end}\n\n{step} failed with status {status}; {LOG} has all that was printed.\n{hint}")


def log(text: str) -> None:
    """Add to the log. An installation does not fail because it cannot be written."""
    with contextlib.suppress(OSError):
        LOG.parent.mkdir(exist_ok=True)
        with LOG.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")


# --- the server --------------------------------------------------------------


def keep_bytecode_of_tests() -> None:
    """Where Python may not write bytecode beside its sources, write it to a folder of pytest's.

    The tests start dozens of processes, and each would compile its files again: LiteLLM's for six seconds.
    """
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        os.environ.setdefault("PYTHONPYCACHEPREFIX", str(ROOT / ".pytest_cache" / "bytecode"))


def become(arguments: list[str]) -> NoReturn:
    os.chdir(ROOT)
    os.execve(VENV_PYTHON, [str(VENV_PYTHON), *arguments], environment_with_openblas())


def environment_with_openblas() -> dict[str, str]:
    """Return this process' variables with those that preload OpenBLAS, or say how to get it."""
    try:
        openblas = runpy.run_path(str(OPENBLAS))
    except OSError as error:
        raise Refusal(
            f"Cannot read {OPENBLAS}: {error.strerror}. Is this a whole copy of start_llm?"
        ) from error
    library = openblas["find_openblas"]()
    if library is not None:
        return openblas["with_openblas"](os.environ, library)
    if sys.platform == "linux":
        say(openblas["ADVICE"])
    return dict(os.environ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
