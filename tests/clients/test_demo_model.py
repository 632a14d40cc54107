"""Coding agents that suit the demo model, with it: three turns, and the first of them calls a tool.

CLIENTS_HOME=~/clients python3 install_and_run.py --test -m clients tests/clients/test_demo_model.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.demo_model.conversations import ANSWER, RETURNED
from start_llm.config.paths import DEMO_MODEL
from tests.clients.conftest import Endpoints, installed, open_endpoints
from tests.clients.model import COMMAND, NOTE
from tests.clients.table import HELD
from tests.clients.talk import Talk

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def demo_endpoints(clients_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoints]:
    with open_endpoints(tmp_path_factory, folder=DEMO_MODEL) as endpoints:
        yield endpoints


@pytest.mark.parametrize("port", [8080, 4000])
@pytest.mark.parametrize(("name", "tool"), [("pi", "bash"), ("continue", "Bash")])
def test_three_turns_with_the_demo_model(
    name: str, tool: str, port: int, demo_endpoints: Endpoints, clients_home: Path, tmp_path: Path
):
    agent = installed(HELD[name], clients_home)
    talk = Talk(agent, clients_home, demo_endpoints.ports[port], demo_endpoints.trace, tmp_path)
    (talk.place.work / NOTE).write_text("The kettle sings at nine.\nNot before.\n")
    answers = {
        f"Use the {tool} tool to run {COMMAND}": f"{RETURNED}The kettle sings at nine.",
        "Reply with the single word pelican": "pelican",
        "Who are you?": ANSWER,
    }
    turns = [talk.say(question) for question in answers]
    print("\n\n".join(f"> {question}\n{turn.printed}" for question, turn in zip(answers, turns, strict=True)))
    assert [turn.status for turn in turns] == [0, 0, 0]
    assert [turn.printed.strip() for turn in turns] == list(answers.values())
    assert [len(turn.lines) for turn in turns] == [2, 1, 1], "the first turn calls the tool"
    assert min(turn.cached for turn in turns[1:]) >= 0.9
    assert min(turn.efficiency for turn in turns[1:]) >= 0.97
