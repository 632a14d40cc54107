"""The table of these commands: their arguments, and what they do."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from start_llm.commands.client_commands import add_client_commands, clients, config, launch, warm
from start_llm.commands.login_service import (
    install_service,
    manager_of,
    service_command,
    tell_service,
    uninstall_service,
)
from start_llm.commands.server_status import tell_status
from start_llm.commands.stop import stop
from start_llm.commands.upgrade import Checkout, lines_for, origin_of_package
from start_llm.config.env_file import read_env_file
from start_llm.config.flags import add_flags, variables_of, words_of
from start_llm.config.paths import ENV_FILE, IS_CHECKOUT, ROOT
from start_llm.config.settings import Settings, SettingSource, all_rows, load
from start_llm.core.errors import CommandError
from start_llm.launch.server_info import servers_of

_NOT_UPGRADED = 1
_END_S = 20.0
"""Seconds that a server may take to end after its running requests."""


def add_commands(commands: Any) -> None:
    """Add the parsers of these commands."""
    add_client_commands(commands)
    status = commands.add_parser(
        "status", help="which server runs, and what it does; exit status 3 if none does", allow_abbrev=False
    )
    status.add_argument("--json", action="store_true", help="as JSON")
    stopped = commands.add_parser(
        "stop", help="stop the running server; exit status 3 if none runs", allow_abbrev=False
    )
    stopped.add_argument("--port", type=int, metavar="N", help="of the server to stop, if several run")
    stopped.add_argument("--now", action="store_true", help="do not wait for running requests")
    commands.add_parser(
        "upgrade", help="bring this installation up to date, or leave it as it was", allow_abbrev=False
    )
    _add_service(commands.add_parser("service", help="run the server at every login", allow_abbrev=False))


def _add_service(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True)
    installed = actions.add_parser(
        "install",
        help="install the service and start it",
        usage="%(prog)s [--print] [options]",
        description="Install a service of systemd or launchd that runs the server. It takes serve's options.",
        allow_abbrev=False,
    )
    installed.add_argument("--print", action="store_true", help="show the service's file, and do nothing")
    add_flags(installed)
    actions.add_parser("uninstall", help="stop the service and remove it", allow_abbrev=False)
    actions.add_parser("status", help="whether the service runs; exit status 3 if not", allow_abbrev=False)


def _status(settings: Settings, options: argparse.Namespace) -> int:
    return tell_status(settings, as_json=options.json, stream=sys.stdout)


def _stop(settings: Settings, options: argparse.Namespace) -> int:
    """Stop the server, in the time that it has for running requests and for its own end."""
    return stop(
        lambda: servers_of(settings),
        options.port,
        settings.server.port,
        _say,
        patience_s=settings.server.drain_s + _END_S,
        at_once=options.now,
    )


def _upgrade(settings: Settings, _: argparse.Namespace) -> int:
    """Upgrade a checkout, or say how a package is upgraded."""
    if not IS_CHECKOUT:
        _say("This start_llm is a package. Upgrade it with:")
        for line in lines_for(origin_of_package(), Path(sys.prefix), sys.executable):
            _say(f"  {line}")
        return _NOT_UPGRADED
    if running := servers_of(settings):
        raise CommandError(
            f"The server at {running[0].url} runs from these files. Stop it first: start_llm stop"
        )
    Checkout(ROOT, _say).upgrade()
    return 0


def _service(of_shell: Settings, options: argparse.Namespace) -> int:
    manager = manager_of(sys.platform, Path.home(), os.environ, service_command(of_shell, ()).stop_s)
    if options.action == "uninstall":
        return uninstall_service(manager, _say)
    if options.action == "status":
        return tell_service(manager, _say)
    settings, flags = _settings_of_service(options), words_of(options)
    if options.print:
        sys.stdout.write(manager.describe(service_command(settings, flags)).decode())
        return 0
    return install_service(manager, settings, flags, _say)


def _settings_of_service(options: argparse.Namespace) -> Settings:
    """Return the settings that a service has. It does not see the variables of a shell."""
    in_file = read_env_file(ENV_FILE, [row.name for row in all_rows()])
    return load(SettingSource("command line", variables_of(options)), SettingSource(".env", in_file))


def _say(line: str) -> None:
    print(line, flush=True)


COMMANDS: Mapping[str, Callable[[Settings, argparse.Namespace], int]] = {
    "launch": launch,
    "clients": clients,
    "config": config,
    "warm": warm,
    "status": _status,
    "stop": _stop,
    "upgrade": _upgrade,
    "service": _service,
}
UNDONE: Mapping[str, str] = {
    "launch": "set {client} up",
    "config": "set {client} up",
    "warm": "warm {client}",
    "status": "tell the status",
    "stop": "stop the server",
    "upgrade": "upgrade",
    "service": "{action} the service",
}
"""What a command cannot do when it fails, by its name."""
