"""`start_llm service`: run the server whenever its user is logged in, by systemd or launchd."""

import os
import plistlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from start_llm.commands.server_status import NOT_RUNNING
from start_llm.config.paths import IS_CHECKOUT, ROOT, from_root, program
from start_llm.config.settings import Settings, all_rows
from start_llm.core.errors import CommandError
from start_llm.launch.server_info import servers_of
from start_llm.storage.private_files import private_folder

LABEL = "local.start_llm"
_BETWEEN_STARTS_S = 10
_AGAIN = "END_WHEN_STUCK"
"""The setting with which a server ends that cannot go on; the manager then starts it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceCommand:
    """How a service runs the server.

    Attributes:
        words: the program and its arguments.
        folder: where it runs.
        log: the file for what it prints, where the system keeps no log of its own.
        stop_s: seconds that it may take to end.
    """

    words: Sequence[str]
    folder: Path
    log: Path
    stop_s: float


def systemd_unit(command: ServiceCommand) -> str:
    """Return the unit file.

    A bad setting (status 2) is not tried again, and a server that was ended at once (130, 143) has not
    failed. systemd expands variables in arguments, but not in the program's path.
    """
    program, *arguments = command.words
    return f"""\
[Unit]
Description=start_llm, a local LLM server for coding agents

[Service]
ExecStart={" ".join([_quoted(program), *(_quoted(word.replace("$", "$$")) for word in arguments)])}
WorkingDirectory={_escaped(str(command.folder))}
Environment={_AGAIN}=true
Restart=on-failure
RestartSec={_BETWEEN_STARTS_S}
RestartPreventExitStatus=2
SuccessExitStatus=130 143
TimeoutStopSec={command.stop_s:g}

[Install]
WantedBy=default.target
"""


def _quoted(word: str) -> str:
    text = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{_escaped(text)}"'


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def launchd_plist(command: ServiceCommand) -> bytes:
    """Return the property list of an agent."""
    return plistlib.dumps(
        {
            "Label": LABEL,
            "ProgramArguments": list(command.words),
            "WorkingDirectory": str(command.folder),
            "EnvironmentVariables": {_AGAIN: "true"},
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": _BETWEEN_STARTS_S,
            "ExitTimeOut": round(command.stop_s),
            "ProcessType": "Interactive",
            "StandardOutPath": str(command.log),
            "StandardErrorPath": str(command.log),
        }
    )


_UNIT = "start_llm.service"
_PATIENCE_S = 60
_POLL_S = 0.2
_SHOWN = " `start_llm service install --print` shows the file that it would get."


class Systemd:
    """The systemd of a Linux user.

    Attributes:
        path: the file that describes the service.
    """

    def __init__(self, home: Path, environment: Mapping[str, str], stop_s: float = 0) -> None:
        self._patience_s = stop_s + _PATIENCE_S
        config = environment.get("XDG_CONFIG_HOME") or home / ".config"
        self.path = Path(config) / "systemd" / "user" / _UNIT

    def describe(self, command: ServiceCommand) -> bytes:
        """Return the content of the file."""
        return systemd_unit(command).encode()

    def hints(self, command: ServiceCommand) -> Mapping[str, str]:  # noqa: ARG002 - launchd needs it
        """Return commands for the user, by their purpose."""
        return {
            "logs": "journalctl --user --unit start_llm --follow",
            "also without a login": "loginctl enable-linger",
        }

    def check(self) -> None:
        """Check that services can be installed.

        Raises:
            CommandError: they cannot.
        """
        _require("systemctl", "systemd")
        environment = _ask("systemctl", "--user", "show-environment")
        if environment.returncode != 0:
            raise CommandError(
                f"systemd runs no services for this user: {environment.stderr.strip()}.{_SHOWN}"
            )

    def start(self) -> None:
        """Read the file, start the service, and start it at every login from now on.

        Raises:
            CommandError: it cannot be started.
        """
        for words in (("daemon-reload",), ("enable", _UNIT), ("restart", _UNIT)):
            _demand("systemctl", "--user", *words, patience_s=self._patience_s)

    def stop(self) -> None:
        """Stop the service, and start it no more."""
        _ask("systemctl", "--user", "disable", "--now", _UNIT, patience_s=self._patience_s)

    def forget(self) -> None:
        """Tell the manager that the file is gone."""
        _ask("systemctl", "--user", "daemon-reload")

    def state(self) -> str:
        """Return what the manager says of the service; `active` if it runs."""
        return _ask("systemctl", "--user", "is-active", _UNIT).stdout.strip() or "inactive"


class Launchd:
    """The launchd of a user of macOS."""

    def __init__(self, home: Path, stop_s: float = 0) -> None:
        self._patience_s = stop_s + _PATIENCE_S
        self.path = home / "Library" / "LaunchAgents" / f"{LABEL}.plist"
        self._domain = f"gui/{os.getuid()}"

    def describe(self, command: ServiceCommand) -> bytes:
        return launchd_plist(command)

    def hints(self, command: ServiceCommand) -> Mapping[str, str]:
        return {"logs": f"tail -F '{command.log}'"}

    def check(self) -> None:
        _require("launchctl", "launchd")

    def start(self) -> None:
        self.stop()
        _demand("launchctl", "enable", self._name)
        _demand("launchctl", "bootstrap", self._domain, str(self.path))

    def stop(self) -> None:
        """Stop the agent, and wait until it has ended: launchd starts none beside one that is ending."""
        deadline = time.monotonic() + self._patience_s
        _ask("launchctl", "bootout", self._name, patience_s=self._patience_s)
        while self._shown().returncode == 0 and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def forget(self) -> None:
        """launchd does not remember files."""

    def state(self) -> str:
        job = self._shown()
        return "active" if job.returncode == 0 and "state = running" in job.stdout else "inactive"

    def _shown(self) -> subprocess.CompletedProcess[str]:
        return _ask("launchctl", "print", self._name)

    @property
    def _name(self) -> str:
        return f"{self._domain}/{LABEL}"


type ServiceManager = Systemd | Launchd
"""Runs the service of a user. Both have the same methods."""


def manager_of(system: str, home: Path, environment: Mapping[str, str], stop_s: float) -> ServiceManager:
    """Return the manager of a system.

    Args:
        stop_s: seconds that the service may take to end.

    Raises:
        CommandError: services are not known there.
    """
    if system == "darwin":
        return Launchd(home, stop_s)
    if system == "linux":
        return Systemd(home, environment, stop_s)
    raise CommandError(f"There are no services on {system}: they need systemd (Linux) or launchd (macOS).")


def _require(program: str, manager: str) -> None:
    if shutil.which(program) is None:
        raise CommandError(f"{program} is not on PATH: there is no {manager} to run a service.{_SHOWN}")


def _demand(*command: str, patience_s: float = _PATIENCE_S) -> None:
    """Run a command.

    Raises:
        CommandError: it failed; says what it printed.
    """
    done = _ask(*command, patience_s=patience_s)
    if done.returncode != 0:
        message = (done.stderr or done.stdout).strip() or f"status {done.returncode}"
        raise CommandError(f"`{' '.join(command)}` failed: {message}")


def _ask(*command: str, patience_s: float = _PATIENCE_S) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=patience_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, returncode=126, stdout="", stderr=str(error))


_END_S = 20.0

type Say = Callable[[str], None]


def service_command(settings: Settings, flags: Sequence[str]) -> ServiceCommand:
    """Return how a service runs the server with these settings and flags.

    A checkout is started by its installer, as by hand: after an update it installs what has changed.
    """
    start = [str(ROOT / ".venv" / "bin" / "python"), str(ROOT / "install_and_run.py")]
    own = [str(Path(sys.prefix) / "bin" / "start_llm"), "serve"]
    return ServiceCommand(
        words=[*(start if IS_CHECKOUT else own), *flags],
        folder=ROOT if IS_CHECKOUT else Path.home(),
        log=from_root(settings.log.root) / "service.log",
        stop_s=settings.server.drain_s + _END_S,
    )


def install_service(manager: ServiceManager, settings: Settings, flags: Sequence[str], say: Say) -> int:
    """Write the file of the service, and start it. If it cannot be started, there is no file afterwards.

    Raises:
        CommandError: there is no manager, the file cannot be written, or a server runs already.
    """
    manager.check()
    _refuse_second_server(manager, settings)
    command = service_command(settings, flags)
    _warn_of_variables(say)
    _write(manager.path, manager.describe(command), command.log)
    try:
        manager.start()
    except CommandError:
        manager.stop()
        manager.path.unlink(missing_ok=True)
        manager.forget()
        raise
    say(f"Installed {manager.path}. The server starts now, and at every login.")
    own = {"state": f"{program()} service status", "remove": f"{program()} service uninstall"}
    for purpose, line in {**own, **manager.hints(command)}.items():
        say(f"  {purpose}: {line}")
    return 0


def uninstall_service(manager: ServiceManager, say: Say) -> int:
    """Stop the service and remove its file. Return 3 if there is none."""
    if not manager.path.exists():
        say(f"There is no service: {manager.path} does not exist.")
        return NOT_RUNNING
    manager.stop()
    manager.path.unlink()
    manager.forget()
    say(f"Stopped the service, and removed {manager.path}.")
    return 0


def tell_service(manager: ServiceManager, say: Say) -> int:
    """Say whether the service runs. Return 3 if it does not."""
    if not manager.path.exists():
        say("The service is not installed.")
        return NOT_RUNNING
    state = manager.state()
    say(f"The service is {state} ({manager.path}).")
    return 0 if state == "active" else NOT_RUNNING


def _refuse_second_server(manager: ServiceManager, settings: Settings) -> None:
    """Refuse to start a server beside one on the same port, unless that may be the service itself."""
    if manager.path.exists():
        return
    if any(server.port == settings.server.port for server in servers_of(settings)):
        raise CommandError(
            f"A server runs on port {settings.server.port}. Stop it first ({program()} stop), or choose "
            "another port."
        )


def _warn_of_variables(say: Say) -> None:
    names = [row.name for row in all_rows() if os.environ.get(row.name)]
    if names:
        say(f"A service does not see this shell's {', '.join(names)}: put them into .env, or use flags.")


def _write(path: Path, content: bytes, log: Path) -> None:
    try:
        private_folder(log.parent)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise CommandError(f"{error.filename or path} cannot be written: {error.strerror}.") from None
