"""start_llm as an installed package: a wheel in an environment of its own, and no checkout anywhere."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.request
import venv
from collections.abc import Generator
from contextlib import contextmanager
from email import message_from_string
from pathlib import Path
from typing import IO

import pytest

from install_and_run import lines_of
from start_llm import __version__
from start_llm.config.settings import all_rows

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("start_llm", "models", "scripts/package_metadata.py", "pyproject.toml", "requirements.txt")
SOURCES += ("README.md", "LICENSE")

pytestmark = pytest.mark.thorough  # building and installing it takes as long as a minute of other tests


class Installed:
    """An environment with the package. What it requires comes from the environment of the tests.

    `home` is the user's.
    """

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.home, self.environment = folder / "home", folder / "environment"
        self.home.mkdir()
        venv.create(self.environment, with_pip=False)
        (self.packages,) = self.environment.glob("lib/python*/site-packages")
        (self.packages / "tests.pth").write_text(sysconfig.get_path("purelib"))
        self.program = self.environment / "bin" / "start_llm"
        pip = [sys.executable, "-m", "pip", "--python", str(self.environment), "install", "--no-deps"]
        subprocess.run([*pip, "--no-index", "--quiet", str(wheel)], check=True, timeout=60)

    def command(self, *words: str, **environment: str) -> tuple[list[str], dict[str, str]]:
        dropped = {row.name for row in all_rows()} | {"XDG_STATE_HOME", "XDG_CONFIG_HOME"}
        inherited = {name: value for name, value in os.environ.items() if name not in dropped}
        return [str(self.program), *words], inherited | {"HOME": str(self.home)} | environment

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command, variables = self.command(*words, **environment)
        return subprocess.run(
            command, check=False, cwd=self.home, env=variables, capture_output=True, text=True, timeout=60
        )

    @contextmanager
    def serving(self, *words: str, **environment: str) -> Generator[tuple[str, str]]:
        """A server that is ready: its address, and what it has printed so far."""
        command, variables = self.command("serve", "--no-proxy", "--mlx-port", "0", *words, **environment)
        with subprocess.Popen(
            command, cwd=self.home, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            try:
                printed = until_ready(process.stdout)
                (address,) = re.findall(r"address +(\S+)/v1", printed)
                yield address, printed
                time.sleep(0.5)  # the server says that Ctrl-C ends it just before it is so
                process.send_signal(signal.SIGINT)
                assert process.wait(20) == 0
            finally:
                process.kill()


def until_ready(stream: IO[str]) -> str:
    lines: list[str] = []
    for line in stream:
        lines.append(line)
        if "Ctrl-C ends the server" in line:
            return "".join(lines)
    raise AssertionError("".join(lines))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, because a build may leave files beside its sources."""
    copy, target = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        source = ROOT / name
        ignored = shutil.ignore_patterns("__pycache__")
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=ignored)
        else:
            shutil.copy(source, copy / name)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(target)]
    done = subprocess.run([*build, str(copy)], check=False, capture_output=True, text=True, timeout=110)
    if "No matching distribution found for hatchling" in done.stderr:
        pytest.skip("no package index has hatchling, which builds the package")
    assert done.returncode == 0, done.stderr
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(tmp_path_factory, wheel) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed"), wheel)


def test_the_program_is_the_command_line(installed):
    assert installed.run("--version").stdout == f"start_llm {__version__}\n"
    module = [str(installed.environment / "bin" / "python"), "-m", "start_llm", "--help"]
    done = subprocess.run(module, check=True, cwd=installed.home, capture_output=True, text=True, timeout=60)
    assert done.stdout == installed.run("--help").stdout


def test_the_package_requires_what_the_requirements_say(installed):
    (metadata,) = installed.packages.glob("start_llm-*.dist-info/METADATA")
    required = message_from_string(metadata.read_text()).get_all("Requires-Dist", [])

    def plain(lines: list[str]) -> list[str]:
        return sorted(re.sub(r"""["'\s]""", "", line) for line in lines)

    assert plain(required) == plain(lines_of(ROOT / "requirements.txt"))
    assert f"Version: {__version__}\n" in metadata.read_text()


def test_the_package_has_every_file_of_the_program(installed):
    def files(folder: Path) -> set[str]:
        paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        return {str(path) for path in paths if "__pycache__" not in path.parts}

    package = files(installed.packages / "start_llm")
    demo = {name for name in package if name.startswith("bundled_models/demo/")}
    assert package - demo == files(ROOT / "start_llm")
    assert {name.removeprefix("bundled_models/demo/") for name in demo} == files(ROOT / "models" / "demo")


@pytest.mark.long
def test_it_serves_the_demo_model_and_keeps_everything_in_the_users_folder(installed):
    settings = installed.home / ".config" / "start_llm" / ".env"
    settings.parent.mkdir(parents=True)
    settings.write_text("BATCH=3\n")
    with installed.serving("--demo") as (address, printed):
        asked = urllib.request.Request(address, headers={"Accept": "text/html"})
        with urllib.request.urlopen(asked, timeout=10) as page:
            assert b"<script" in page.read()
        with urllib.request.urlopen(f"{address}/stats", timeout=10) as stats:
            assert json.load(stats)["batch"]["configured"] == 3
    assert re.search(rf"{installed.program} (launch --base-url {address} \w+|clients)\n", printed)
    data = installed.home / ".local" / "state" / "start_llm"
    assert (data / "state" / "seal.key").is_file()
    assert (data / "logs").is_dir()
    written = {path.name for path in installed.home.iterdir()}
    assert written == {".config", ".local"}
    assert not (installed.packages / "logs").exists()
    settings.unlink()


@pytest.mark.long
def test_a_program_on_path_is_called_by_its_name(installed):
    path = f"{installed.program.parent}:{os.environ['PATH']}"
    with installed.serving("--demo", PATH=path) as (address, printed):
        assert re.search(rf"\n    start_llm (launch --base-url {address} \w+|clients)\n", printed)


@pytest.mark.long
def test_a_model_beside_the_user_is_found(installed, tiny_model):
    shutil.copytree(tiny_model("qwen3"), installed.home / "mine")
    with installed.serving("--model", "mine") as (_, printed):
        assert re.search(r"model +mine\n", printed)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads a unit of systemd")
def test_a_service_of_the_package_starts_its_program(installed):
    shown = installed.run("service", "install", "--print", "--demo", "--no-proxy", "--mlx-port", "0").stdout
    (line,) = re.findall(r"^ExecStart=(.*)$", shown, re.MULTILINE)
    program, *words = shlex.split(line)
    assert (program, words[0]) == (str(installed.program), "serve")
    assert f"WorkingDirectory={installed.home}\n" in shown
    with installed.serving(*words[1:]) as (_, printed):
        assert re.search(r"model +demo\n", printed)


def test_without_the_demo_model_the_start_says_what_is_missing(installed, tmp_path):
    demo = installed.packages / "start_llm" / "bundled_models"
    demo.rename(tmp_path / "away")
    try:
        done = installed.run("serve", "--demo", "--no-proxy", "--mlx-port", "0")
    finally:
        (tmp_path / "away").rename(demo)
    assert done.returncode == 2
    assert f"MODEL_PATH='{demo / 'demo'}': no such folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_package_says_how_it_is_upgraded(installed):
    done = installed.run("upgrade")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("This start_llm is a package. Upgrade it with:\n  It came from file:///")
