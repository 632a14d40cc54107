"""`start_llm` alone: what runs, and what to do next. Each choice runs the command of its name."""

import io
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote

from start_llm import __version__
from start_llm.commands.background import start_in_background
from start_llm.commands.client_commands import unsuited_for
from start_llm.commands.server_status import tell_status
from start_llm.config.paths import program
from start_llm.config.settings import Settings
from start_llm.core.columns import columns
from start_llm.core.errors import LaunchError, StartupError
from start_llm.launch.clients import CLIENTS
from start_llm.launch.http_requests import NO_KEY, ask
from start_llm.launch.server_info import ServerInfo, find_running, own_url, servers_of
from start_llm.launch.suitability import is_installed

_LOAD_S = 3600.0
_MODEL_COMMANDS = ("search", "pull", "fit", "rm")


class ListedOnDisk(NamedTuple):
    """A model on this machine: the cells that `models` shows of it, and what `--model` takes for it."""

    cells: Sequence[str]
    word: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MenuWorld:
    """What a menu works with.

    Attributes:
        run: runs a command in this process, and returns its exit status.
        compute: runs one in a process of its own, which preloads what it needs to compute.
        models: returns the models on this machine, and the names of their cells. Takes seconds.
        read: asks for a line; raises EOFError if there is none.
        say: prints a line.
    """

    settings: Settings
    run: Callable[[Sequence[str]], int]
    compute: Callable[[Sequence[str]], int]
    models: Callable[[], tuple[Sequence[str], Sequence[ListedOnDisk]]]
    read: Callable[[str], str]
    say: Callable[[str], None]


class Choice(NamedTuple):
    """A line of the menu, the command that does the same, and what it does; True ends the menu."""

    text: str
    command: str
    act: Callable[[], bool]


class Menu:
    """The menu of a terminal."""

    def __init__(self, world: MenuWorld) -> None:
        self._world = world
        self._say = world.say

    def tell(self) -> None:
        """Print what runs, and the command for each choice."""
        self._tell_state()
        for choice in self._choices():
            self._say(f"  {choice.text:<38}  start_llm {choice.command}")

    def open(self) -> int:
        """Print what runs, and do what the user chooses until it is enough."""
        with suppress(ImportError):  # some builds of Python lack it; it gives lines keys to edit them with
            import readline  # noqa: F401, PLC0415  # pyright: ignore[reportUnusedImport]
        try:
            while not self._one_round():
                self._say("")
        except EOFError:
            self._say("")
        return 0

    def _one_round(self) -> bool:
        self._tell_state()
        choices = self._choices()
        for number, choice in enumerate(choices, 1):
            self._say(f"  {number}  {choice.text}")
        chosen = self._chosen("\nNumber, or q to leave: ", len(choices))
        if chosen is None:
            return True
        try:
            return choices[chosen].act()
        except StartupError as error:
            self._say(str(error))
            return False

    def _tell_state(self) -> None:
        output = io.StringIO()
        self._say(f"start_llm {__version__}\n")
        tell_status(self._world.settings, as_json=False, stream=output)
        self._say(output.getvalue())

    def _choices(self) -> list[Choice]:
        if servers_of(self._world.settings):
            return [
                Choice("start a coding client", "launch CLIENT", self._launch),
                Choice("serve another model, or get one", "models", self._models),
                Choice("examine this machine", "doctor", self._doctor),
                Choice("stop the server", "stop", self._stop),
            ]
        return [
            Choice("start the server", "serve", self._serve),
            Choice("choose a model, or get one", "models", self._models),
            Choice("examine this machine", "doctor", self._doctor),
            Choice("see which coding clients there are", "clients", self._list_clients),
        ]

    # ------------------------------------------------------------------------------------------- the server

    def _serve(self, *flags: str) -> bool:
        start_in_background(self._world.settings, flags, self._say)
        return False

    def _stop(self) -> bool:
        self._world.run(["stop"])
        return False

    def _doctor(self) -> bool:
        if servers_of(self._world.settings):
            if not self._agrees("The server has to stop for it. Stop it now?"):
                return False
            self._world.run(["stop"])
        self._world.compute(["doctor"])
        return False

    # ------------------------------------------------------------------------------------------- the models

    def _models(self) -> bool:
        head, models = self._world.models()
        rows = [("", *head), *((str(number), *model.cells) for number, model in enumerate(models, 1))]
        for line in columns(rows):
            self._say(f"  {line}")
        self._say(
            "\n  A number or a name serves that model. Here too: search WORDS, pull NAME, fit NAME, rm NAME."
        )
        words = _words(self._world.read("Model, or Enter to go back: "))
        if words[:1] and words[0] in _MODEL_COMMANDS:
            self._world.run(words)
            return self._models()
        if name := " ".join(words):
            self._use(models[int(name) - 1].word if _is_number(name, len(models)) else name)
        return False

    def _use(self, model: str) -> None:
        """Have the running server load a model that it has, or start one that has it."""
        served = self._served()
        name = model.rstrip("/").rpartition("/")[2]
        listed = [entry.name for entry in served.models if entry.name in (model, name)] if served else []
        if served and listed:
            self._load(served, listed[0])
            return
        if served:
            if not self._agrees(f"The running server has no {model}. Stop it, and start one that has?"):
                return
            self._world.run(["stop"])
        self._serve("--model", model)

    def _load(self, served: ServerInfo, name: str) -> None:
        """Load a model through the server's own port: the proxy has no way to it."""
        settings = self._world.settings
        of_settings = own_url(settings.server.host, settings.server.port)
        urls = (server.url for server in servers_of(settings) if served.url in (server.url, server.proxy_url))
        key = next(iter(settings.access.keys), NO_KEY)
        self._say(f"Loading {name} ...")
        path = f"/v1/models/{quote(name, safe='')}/load"
        answer = ask(next(urls, of_settings) + path, key, _LOAD_S, {})
        if answer is None or answer.status != 200:
            raise LaunchError(f"{served.url} did not load {name}.")
        self._say(f"{name} is loaded, and answers requests that name it.")

    # ------------------------------------------------------------------------------------------ the clients

    def _list_clients(self) -> bool:
        self._world.run(["clients"])
        return False

    def _launch(self) -> bool:
        served = self._served()
        names = [*CLIENTS]
        for number, line in enumerate(self._client_lines(unsuited_for(served) if served else {}), 1):
            self._say(f"  {number}  {line}")
        chosen = self._chosen("\nNumber of a client, or Enter to go back: ", len(names))
        if chosen is None or not (self._is_there(names[chosen]) or self._install(names[chosen])):
            return False
        self._world.run(["launch", names[chosen]])
        return True

    def _client_lines(self, unsuited: dict[str, str]) -> Iterator[str]:
        for name in CLIENTS:
            state = "installed" if self._is_there(name) else "not installed"
            reason = f"does not suit the model: {unsuited[name]}" if name in unsuited else ""
            yield f"{name:<9} {state:<14} {reason}".rstrip()

    def _is_there(self, name: str) -> bool:
        return is_installed(name, os.environ.get("PATH"))

    def _install(self, name: str) -> bool:
        """Offer to install a client. Return True if it is there afterwards."""
        command = shlex.split(CLIENTS[name].install)
        self._say(f"{name} is not installed. This installs it: {CLIENTS[name].install}")
        if shutil.which(command[0]) is None:
            self._say(f"{command[0]} is not on PATH. It comes with Node.js (https://nodejs.org).")
            return False
        if not self._agrees("Run that now?"):
            return False
        subprocess.run(command, check=False)
        return self._is_there(name)

    # --------------------------------------------------------------------------------------------- questions

    def _served(self) -> ServerInfo | None:
        try:
            return find_running(self._world.settings, say=self._say)
        except LaunchError:
            return None

    def _chosen(self, question: str, count: int) -> int | None:
        """Return the place of what the user chooses; None to leave."""
        while answer := self._world.read(question).strip().lower():
            if _is_number(answer, count):
                return int(answer) - 1
            if answer in ("q", "quit", "exit"):
                return None
            self._say(f"There are the numbers 1 to {count}.")
        return None

    def _agrees(self, question: str) -> bool:
        return self._world.read(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def _is_number(text: str, most: int) -> bool:
    return text.isascii() and text.isdigit() and 1 <= int(text) <= most


def _words(text: str) -> list[str]:
    """Return words as a shell reads them; those between blanks, if a shell would not understand the text."""
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def compute(words: Sequence[str]) -> int:
    """Run a command in a process of its own, and return its exit status.

    Ctrl-C reaches that process too, and it takes its time to put away what it has made.
    """
    with subprocess.Popen([program(), *words]) as process:
        while True:
            with suppress(KeyboardInterrupt):
                return process.wait()
