"""`start_llm service`, with programs that play systemctl and launchctl and record what they are asked."""

from __future__ import annotations

import os
import plistlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from start_llm.commands.login_service import (
    Launchd,
    ServiceCommand,
    Systemd,
    install_service,
    launchd_plist,
    manager_of,
    service_command,
    systemd_unit,
    tell_service,
    uninstall_service,
)
from start_llm.config.settings import Settings
from start_llm.core.errors import CommandError
from start_llm.storage.running_servers import RunningServer, ServerFile
from tests.commands.conftest import ROOT, Shell
from tests.flat_settings import settings_of

pytestmark = pytest.mark.thorough

UNIT = Path(".config/systemd/user/start_llm.service")
AWKWARD = ["/a b/python", 'quo"te', "back\\slash", "100%", "$HOME", "--model", "é", ""]
SYSTEMCTL = """\
shift
echo "$*" >> "$HOME/calls"
[ -e "$HOME/fail-$1" ] && { echo "Failed to $1 the unit" >&2; exit 1; }
[ "$1" = is-active ] && cat "$HOME/state"
exit 0"""
LAUNCHCTL = """\
echo "$*" >> "$HOME/calls"
[ -e "$HOME/fail-$1" ] && { echo "$1 failed: 5: Input/output error" >&2; exit 5; }
case "$1" in
    print) [ -e "$HOME/loaded" ] || exit 113; echo "	state = $(cat "$HOME/state")" ;;
    bootstrap) [ -e "$HOME/loaded" ] && exit 5; echo running > "$HOME/state"; touch "$HOME/loaded" ;;
    bootout) (sleep 0.5; rm -f "$HOME/loaded") > /dev/null 2>&1 & ;;
esac
exit 0"""
"""As the real one: an agent takes its time to end, and another one cannot be loaded meanwhile."""


def calls(home: Path) -> list[str]:
    path = home / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return lines


def a_command(words: list[str], folder: str = "/a b/100%") -> ServiceCommand:
    return ServiceCommand(words=words, folder=Path(folder), log=Path("/logs/service.log"), stop_s=30)


# --------------------------------------------------------------------------------------------------- systemd

linux = pytest.mark.skipif(sys.platform != "linux", reason="the command line takes launchd on macOS")


@pytest.fixture
def systemd(shell) -> Shell:
    shell.add_program("systemctl", SYSTEMCTL)
    return shell


@linux
def test_install_writes_the_unit_and_starts_it(systemd):
    done = systemd.run("service", "install", "--demo", "--batch", "2", "--mlx-port", "8123")
    assert (done.returncode, done.stderr) == (0, "")
    unit = (systemd.home / UNIT).read_text()
    (line,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    assert shlex.split(line) == [
        str(ROOT / ".venv" / "bin" / "python"),
        str(ROOT / "install_and_run.py"),
        *("--mlx-port", "8123", "--batch", "2", "--demo"),
    ]
    assert calls(systemd.home) == [
        "show-environment",
        "daemon-reload",
        "enable start_llm.service",
        "restart start_llm.service",
    ]
    for hint in ("journalctl --user --unit start_llm", "service uninstall", "enable-linger"):
        assert hint in done.stdout
    assert "does not see this shell's MLX_PORT, STATE_ROOT, PROXY" in done.stdout.replace("\n", " ")


@linux
def test_printing_shows_the_unit_and_does_nothing(shell):
    done = shell.run("service", "install", "--print", "--batch", "2", environment={"PATH": "/nowhere"})
    assert done.stdout.startswith("[Unit]\n")
    assert '"--batch" "2"' in done.stdout
    assert list(shell.home.iterdir()) == []


@linux
def test_a_service_that_cannot_be_started_leaves_no_file(systemd):
    (systemd.home / "fail-restart").touch()
    done = systemd.run("service", "install", "--demo")
    assert done.returncode == 2
    assert done.stderr == (
        "start_llm cannot install the service.\n"
        "`systemctl --user restart start_llm.service` failed: Failed to restart the unit\n"
    )
    assert not (systemd.home / UNIT).exists()
    assert calls(systemd.home)[-2:] == ["disable --now start_llm.service", "daemon-reload"]


@linux
def test_uninstall_stops_it_and_removes_the_file(systemd):
    assert systemd.run("service", "uninstall").returncode == 3
    systemd.run("service", "install", "--demo")
    calls(systemd.home)
    done = systemd.run("service", "uninstall")
    assert (done.returncode, done.stderr) == (0, "")
    assert calls(systemd.home) == ["disable --now start_llm.service", "daemon-reload"]
    assert not (systemd.home / UNIT).exists()


@pytest.mark.long
@linux
def test_the_status_is_the_managers(systemd):
    done = systemd.run("service", "status")
    assert (done.returncode, done.stdout) == (3, "The service is not installed.\n")
    systemd.run("service", "install", "--demo")
    for state, status in (("active", 0), ("failed", 3)):
        (systemd.home / "state").write_text(f"{state}\n")
        done = systemd.run("service", "status")
        assert (done.returncode, done.stdout) == (
            status,
            f"The service is {state} ({systemd.home / UNIT}).\n",
        )


@linux
def test_without_systemd_the_reason_is_reported(shell, systemd):
    done = shell.run("service", "install", environment={"PATH": "/nowhere"})
    assert done.returncode == 2
    assert "systemctl is not on PATH: there is no systemd to run a service." in done.stderr
    (systemd.home / "fail-show-environment").touch()
    done = systemd.run("service", "install")
    assert done.returncode == 2
    assert "systemd runs no services for this user: Failed to show-environment the unit." in done.stderr
    assert not (systemd.home / UNIT).exists()


@linux
def test_a_bad_flag_is_refused_before_anything_is_installed(systemd):
    done = systemd.run("service", "install", "--batch", "many")
    assert done.returncode == 2
    assert "BATCH='many' (command line): expected a whole number" in done.stderr
    assert not (systemd.home / UNIT).exists()


@linux
def test_a_second_server_on_the_port_is_refused(systemd):
    file = ServerFile(systemd.state / "servers")
    url = "http://127.0.0.1:8123"
    file.write(RunningServer(pid=os.getpid(), url=url, proxy_url=None, version="1", started_at=1.0))
    done = systemd.run("service", "install", "--mlx-port", "8123", cwd=ROOT)
    assert done.returncode == 0, "the service has a state folder of its own"
    assert systemd.run("service", "uninstall").returncode == 0
    manager = Systemd(systemd.home, {})
    settings = settings_of(server_port=8123, state_root=str(systemd.state))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", systemd.environment["PATH"])
        patch.setenv("HOME", str(systemd.home))
        with pytest.raises(CommandError, match="A server runs on port 8123"):
            install_service(manager, settings, [], print)
    file.remove()


def test_the_folder_of_xdg_counts(tmp_path):
    assert Systemd(tmp_path, {"XDG_CONFIG_HOME": "/c"}).path == Path("/c/systemd/user/start_llm.service")


@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_who_ends_a_service_waits_as_long_as_its_requests_may_take(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    waits: list[float] = []

    def run(words: Sequence[str], *, timeout: float, **_: object) -> subprocess.CompletedProcess[str]:
        waits.append(timeout)
        return subprocess.CompletedProcess(words, int("print" in words), "", "")

    monkeypatch.setattr(subprocess, "run", run)
    settings = settings_of(drain_s=600.0)
    manager = manager_of(system, tmp_path, {}, service_command(settings, ()).stop_s)
    for act in (manager.start, manager.stop):
        waits.clear()
        act()
        assert max(waits) > 620


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit_with_awkward_names(tmp_path):
    folder = tmp_path / "a b 100%"
    folder.mkdir()
    program = folder / "pyth$on"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for name, words in (("good", [str(program), *AWKWARD]), ("bad", ["/no/such/program"])):
        path = tmp_path / f"{name}.service"
        path.write_text(systemd_unit(a_command(words, str(folder))))
        verify = ["systemd-analyze", "--user", "verify", str(path)]
        environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
        done = subprocess.run(
            verify, check=False, capture_output=True, text=True, env=environment, timeout=60
        )
        complaints = [line for line in done.stderr.splitlines() if path.name in line]
        assert bool(complaints) == (name == "bad"), done.stderr


# --------------------------------------------------------------------------------------------------- launchd


@pytest.fixture
def launchd(shell, monkeypatch) -> Launchd:
    shell.add_program("launchctl", LAUNCHCTL)
    monkeypatch.setenv("PATH", shell.environment["PATH"])
    monkeypatch.setenv("HOME", str(shell.home))
    return Launchd(shell.home)


@pytest.fixture
def settings(tmp_path) -> Settings:
    return settings_of(log_root=str(tmp_path / "logs"), state_root=str(tmp_path / "state"))


def test_an_agent_is_written_and_started(launchd, settings, shell, tmp_path):
    lines: list[str] = []
    assert install_service(launchd, settings, ["--demo"], lines.append) == 0
    agent = plistlib.loads(launchd.path.read_bytes())
    assert launchd.path == shell.home / "Library" / "LaunchAgents" / "local.start_llm.plist"
    assert agent["ProgramArguments"][1:] == [str(ROOT / "install_and_run.py"), "--demo"]
    assert agent["WorkingDirectory"] == str(ROOT)
    assert (agent["RunAtLoad"], agent["KeepAlive"]) == (True, {"SuccessfulExit": False})
    assert agent["StandardOutPath"] == agent["StandardErrorPath"] == str(tmp_path / "logs" / "service.log")
    assert (tmp_path / "logs").is_dir()
    name = f"gui/{os.getuid()}/local.start_llm"
    commands = [line for line in calls(shell.home) if not line.startswith("print ")]
    assert commands == [
        f"bootout {name}",
        f"enable {name}",
        f"bootstrap gui/{os.getuid()} {launchd.path}",
    ]
    assert any(line == f"  logs: tail -F '{tmp_path}/logs/service.log'" for line in lines)


def test_an_agent_that_cannot_be_started_leaves_no_file(launchd, settings, shell):
    (shell.home / "fail-bootstrap").touch()
    with pytest.raises(CommandError, match="bootstrap failed: 5: Input/output error"):
        install_service(launchd, settings, [], print)
    assert not launchd.path.exists()


@pytest.mark.thorough
def test_an_agent_is_looked_at_and_removed(launchd, settings, shell):
    lines: list[str] = []
    assert tell_service(launchd, lines.append) == 3
    install_service(launchd, settings, [], print)
    for state, status in (("running", 0), ("waiting", 3)):
        (shell.home / "state").write_text(state)
        assert tell_service(launchd, lines.append) == status
    calls(shell.home)
    assert uninstall_service(launchd, lines.append) == 0
    assert calls(shell.home)[0] == f"bootout gui/{os.getuid()}/local.start_llm"
    assert not launchd.path.exists()
    assert not (shell.home / "loaded").exists(), "it has ended"


def test_an_agent_is_installed_anew_once_the_old_one_has_ended(launchd, settings):
    assert install_service(launchd, settings, [], print) == 0
    assert install_service(launchd, settings, ["--demo"], print) == 0
    assert plistlib.loads(launchd.path.read_bytes())["ProgramArguments"][-1] == "--demo"


def test_awkward_names_reach_launchd_as_they_are():
    assert plistlib.loads(launchd_plist(a_command(AWKWARD)))["ProgramArguments"] == AWKWARD


def test_without_launchd_the_reason_is_reported(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CommandError, match="there is no launchd to run a service"):
        install_service(Launchd(tmp_path), settings, [], print)


def test_each_system_has_its_manager(tmp_path):
    assert isinstance(manager_of("darwin", tmp_path, {}, 50), Launchd)
    assert isinstance(manager_of("linux", tmp_path, {}, 50), Systemd)
    with pytest.raises(CommandError, match="There are no services on freebsd14"):
        manager_of("freebsd14", tmp_path, {}, 50)
