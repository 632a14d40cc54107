"""`start_llm service`: run the server whenever its user is logged in."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from start_llm.commands.server_status import NOT_RUNNING
from start_llm.commands.service_managers import ServiceCommand, ServiceManager
from start_llm.config.paths import IS_CHECKOUT, ROOT, from_root, program
from start_llm.config.settings import Settings, all_rows
from start_llm.core.errors import CommandError
from start_llm.launch.server_info import servers_of
from start_llm.storage.private_files import private_folder

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
        log=from_root(settings.log_root) / "service.log",
        stop_s=settings.drain_s + _END_S,
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
    if any(server.port == settings.mlx_port for server in servers_of(settings)):
        raise CommandError(
            f"A server runs on port {settings.mlx_port}. Stop it first ({program()} stop), or choose another "
            "port."
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
