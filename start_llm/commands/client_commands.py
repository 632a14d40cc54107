"""The commands about coding clients: `launch`, `config`, `warm`, `clients`."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from start_llm.commands.warm_client import warm_lines
from start_llm.config.paths import from_root
from start_llm.config.settings import Settings
from start_llm.core.errors import LaunchError
from start_llm.launch.client import Client
from start_llm.launch.clients import CLIENTS
from start_llm.launch.http_requests import Address, count_tokens
from start_llm.launch.own_settings import OwnSettings
from start_llm.launch.server_info import ServerInfo, find_running
from start_llm.launch.setup import Setup, as_script, become, make_setup, program_of
from start_llm.launch.suitability import is_installed, judge, menu, unsuited_clients

OWN_OPTIONS = ("--base-url", "--model")
"""Options that `launch` takes for its own behind the client's name too, where users write them."""
_NOT_STARTED = 1


def add_client_commands(commands: Any) -> None:
    """Add the parsers of these commands."""
    launched = commands.add_parser(
        "launch", help="start a coding client for the running server", allow_abbrev=False
    )
    commands.add_parser(
        "clients", help="list the coding clients: which suit the model, how to get them", allow_abbrev=False
    )
    shown = commands.add_parser("config", help="print what launch sets for a client", allow_abbrev=False)
    warmed = commands.add_parser(
        "warm", help="read into memory what a client's conversations begin with", allow_abbrev=False
    )
    for command in (launched, shown, warmed):
        command.add_argument("--base-url", metavar="URL", help="the server, if not the one that runs")
        command.add_argument("--model", metavar="NAME", help="the model, if not the one that was used last")
        command.add_argument("client", choices=CLIENTS)
    # Arguments after the client's name go to the client, but for our options right behind it.
    launched.add_argument("arguments", nargs=argparse.REMAINDER, help="for the client")


def launch(settings: Settings, options: argparse.Namespace) -> int:
    """Become the client; 1 if the user does not want it for this model."""
    take_own_options(options)
    program = program_of(CLIENTS[options.client], os.environ)
    setup = _setup(settings, options)
    for note in setup.notes:
        print(note, file=sys.stderr)
    reason = judge(setup.served.window, _counter(setup.served))
    why = reason(CLIENTS[options.client])
    if not why or _goes_on(options.client, setup.served.model, why, reason):
        become(program, setup, options.arguments, os.environ)
    return _NOT_STARTED


def take_own_options(options: argparse.Namespace) -> None:
    """Take options of ours from the beginning of what is for the client."""
    words: list[str] = options.arguments
    while words:
        name, joined, value = words[0].partition("=")
        attribute = name.removeprefix("--").replace("-", "_")
        if name not in OWN_OPTIONS or getattr(options, attribute) is not None:
            break
        if not joined and len(words) < 2:
            raise LaunchError(f"{name} expects a value.")
        setattr(options, attribute, value if joined else words[1])
        words = words[1:] if joined else words[2:]
    options.arguments = words


def config(settings: Settings, options: argparse.Namespace) -> int:
    """Print the lines that set a client up."""
    sys.stdout.write(as_script(options.client, _setup(settings, options)))
    return 0


def warm(settings: Settings, options: argparse.Namespace) -> int:
    """Have the server read what a client's conversations begin with, and print what it read."""
    served = find_running(settings, options.base_url, options.model, _say)
    for line in warm_lines(options.client, served):
        print(line)
    return 0


def clients(settings: Settings, _options: argparse.Namespace) -> int:
    """Print each client, how to start or get it, and whether it suits the model that is served."""
    try:
        served = find_running(settings, say=_say)
    except LaunchError:
        served = None
    for name, text in menu(os.environ, unsuited_for(served) if served else {}):
        print(f"  {name:<{max(map(len, CLIENTS))}}  {text}")
    if served:
        print(f"\n  Judged for {served.model}, which is served at {served.url}.")
    else:
        print("\n  No server runs: once it does, this list shows which clients suit its model.")
    return 0


def unsuited_for(served: ServerInfo) -> dict[str, str]:
    """Return the clients that do not suit the model in use, and why."""
    return unsuited_clients(served.window, _counter(served))


def _counter(served: ServerInfo) -> Any:
    return partial(count_tokens, Address(served.url, served.key), served.model)


def _goes_on(name: str, model: str, why: str, reason: Callable[[Client], str]) -> bool:
    """Tell that a client does not suit the model. Ask whether to go on, if somebody can answer."""
    print(f"{name} does not suit {model}: {why}.", file=sys.stderr)
    for line in _proposals(name, reason):
        print(line, file=sys.stderr)
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    print(f"Start {name} all the same? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _proposals(name: str, reason: Callable[[Client], str]) -> Iterator[str]:
    """Yield what would suit: another client."""
    others = [other for other, client in CLIENTS.items() if other != name and not reason(client)]
    here = [other for other in others if is_installed(other, os.environ.get("PATH"))]
    if here:
        yield f"These suit it: {', '.join(here)}. Try: start_llm launch {here[0]}"
    elif others:
        yield f"These suit it: {', '.join(others)}. start_llm clients says how to get them."


def _setup(settings: Settings, options: argparse.Namespace) -> Setup:
    """Return a client's setup for the server that is running."""
    served = find_running(settings, options.base_url, options.model, _say)
    folder = from_root(settings.server.state_root) / "clients" / options.client
    own = OwnSettings(variables=os.environ, work=Path.cwd())
    return make_setup(CLIENTS[options.client], served, folder, own)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
