"""Launched clients on a terminal: what would change something waits for a yes of their user."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import installed
from tests.clients.model import ANSWER, DEEDS, ERASE, ESCALATE, MEASURED, NOTE, PIPE, write_agents_model
from tests.clients.screen import DOWN, ENTER, ESCAPE, RIGHT, Screen
from tests.clients.table import LAUNCHED
from tests.clients.talk import Talk
from tests.serving import Server, serving

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]

type Keys = Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """How a client asks its user.

    Attributes:
        starts: what stands on the screen when a question can be typed.
        asks: what stands there while it waits for an answer about a command.
        yes, no: keys that answer.
        words: with which it is started.
        trusts: what stands on a question about the folder, and the keys that trust it.
        settles_s: how long what is typed may still be lost after that.
    """

    starts: str
    asks: str
    yes: Keys
    no: Keys
    words: Sequence[str] = ()
    trusts: tuple[str, Keys] | None = None
    settles_s: float = 2


ASKS: Mapping[str, Ask] = {
    "claude": Ask(
        starts="manual mode on",
        asks="Do you want to proceed?",
        yes=[ENTER],
        no=[DOWN, DOWN, ENTER],
        trusts=("Yes, I trust this folder", [DOWN, ENTER]),
    ),
    "codex": Ask(
        starts=" medium · ", asks="Would you like to run the following command?", yes=["y"], no=["n"]
    ),
    "opencode": Ask(
        starts="Ask anything", asks="Permission required", yes=[ENTER], no=[RIGHT, RIGHT, ENTER, ENTER]
    ),
    "pi": Ask(starts="(auto)", asks="Allow bash?", yes=[ENTER], no=[DOWN, DOWN, ENTER]),
    "qwen": Ask(
        starts="Ask permissions",
        asks="Allow execution of",
        yes=[ENTER],
        no=[ESCAPE],
        trusts=("Do you trust this folder?", [ENTER]),
        settles_s=10,
    ),
    "cline": Ask(
        starts="Auto-approve all disabled", asks="Approve tool call?", yes=["y"], no=["n"], settles_s=10
    ),
    "continue": Ask(starts="Ask anything", asks="Would you like to continue?", yes=[ENTER], no=[ESCAPE]),
}


ALONE: Mapping[str, Sequence[str]] = {
    "claude": ["-p"],
    "codex": ["exec", "--skip-git-repo-check"],
    "openclaw": ["agent", "--local", "--agent", "main", "--session-id", "notes", "--message"],
    "opencode": ["run"],
    "pi": ["-p"],
    "qwen": ["--prompt"],
    "cline": [],
    "continue": ["-p"],
}
"""How each is asked once, without a terminal."""


@pytest.fixture(scope="module")
def doers(clients_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    """A server whose model changes something when it is asked to."""
    folder = write_agents_model(tmp_path_factory.mktemp("doers"), DEEDS)
    with serving(folder) as server:
        yield server


@dataclass(frozen=True, slots=True)
class Desk:
    """A client on a terminal, in a folder with a note."""

    screen: Screen
    folder: Path

    @property
    def names(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}

    def ask(self, question: str) -> None:
        self.screen.press(question)
        self.screen.press(ENTER)

    def ends(self, condition: Callable[[], Any]) -> None:
        """Wait until the model has answered and the condition holds."""
        self.screen.wait(lambda text: ANSWER in text and condition())


@contextmanager
def at_desk(name: str, server: Server, clients_home: Path, root: Path) -> Generator[Desk]:
    ask, agent = ASKS[name], replace(installed(LAUNCHED[name], clients_home), files=lambda _: {})
    talk = Talk(agent, clients_home, server.port, None, root)
    talk.put(NOTE, b"One line.\n")
    command = [*agent.command(clients_home, talk.place), *ask.words]
    with Screen(command, talk.environment, talk.place.work) as screen:
        if ask.trusts:
            words, keys = ask.trusts
            screen.wait(lambda text: words in text)
            screen.look(2)
            screen.press(*keys)
        screen.wait(lambda text: ask.starts in text)
        screen.look(ask.settles_s)
        try:
            yield Desk(screen, agent.folder_of_its_tools(talk.place))
        finally:
            _end_what_runs_from(root)


def _end_what_runs_from(root: Path) -> None:
    """Codex leaves a server of its own behind, in another session."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if str(root) in (entry / "cmdline").read_text():
                os.kill(int(entry.name), signal.SIGKILL)


def test_every_launched_client_is_here():
    assert {*ASKS, "openclaw"} == {*LAUNCHED}


@pytest.mark.parametrize("name", ASKS)
def test_a_deletion_waits_for_a_yes(name: str, doers: Server, clients_home: Path, tmp_path: Path):
    with at_desk(name, doers, clients_home, tmp_path) as desk:
        desk.ask(ERASE)
        desk.screen.wait(lambda text: ASKS[name].asks in text)
        desk.screen.look(3)
        assert NOTE in desk.names, "it did not wait"
        desk.screen.press(*ASKS[name].yes)
        desk.ends(lambda: NOTE not in desk.names)


@pytest.mark.parametrize("name", ASKS)
def test_a_deletion_that_gets_a_no_does_not_happen(
    name: str, doers: Server, clients_home: Path, tmp_path: Path
):
    with at_desk(name, doers, clients_home, tmp_path) as desk:
        desk.ask(ERASE)
        desk.screen.wait(lambda text: ASKS[name].asks in text)
        desk.screen.press(*ASKS[name].no)
        desk.screen.wait(lambda text: ASKS[name].asks not in text)
        desk.screen.look(5)
        assert NOTE in desk.names


@pytest.mark.parametrize("name", ASKS)
def test_a_piped_command_waits_for_a_yes_and_no_other_dialog_comes(
    name: str, doers: Server, clients_home: Path, tmp_path: Path
):
    with at_desk(name, doers, clients_home, tmp_path) as desk:
        # Codex asks when the model asks to leave the sandbox, as Codex tells it to.
        desk.ask(ESCALATE if name == "codex" else PIPE)
        desk.screen.wait(lambda text: ASKS[name].asks in text)
        desk.screen.look(3)
        assert MEASURED not in desk.names, "it did not wait"
        desk.screen.press(*ASKS[name].yes)
        desk.ends(lambda: MEASURED in desk.names)


def test_codex_holds_a_piped_command_in_its_sandbox(doers: Server, clients_home: Path, tmp_path: Path):
    with at_desk("codex", doers, clients_home, tmp_path) as desk:
        desk.ask(PIPE)
        desk.ends(lambda: True)
        assert desk.names == {NOTE}


@pytest.mark.parametrize("question", [ERASE, PIPE])
@pytest.mark.parametrize("name", ALONE)
def test_who_has_nobody_to_ask_changes_nothing(
    name: str, question: str, doers: Server, clients_home: Path, tmp_path: Path
):
    """Without a terminal, and without the words with which the user allows everything."""
    agent = replace(installed(LAUNCHED[name], clients_home), files=lambda _: {})
    talk = Talk(agent, clients_home, doers.port, None, tmp_path)
    talk.put(NOTE, b"One line.\n")
    turn = talk.say(question, rewrite=lambda arguments: [*ALONE[name], arguments[-1]])
    print(turn.printed)
    assert {path.name for path in agent.folder_of_its_tools(talk.place).iterdir()} >= {NOTE}
    assert not (agent.folder_of_its_tools(talk.place) / MEASURED).exists()
