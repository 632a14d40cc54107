"""Cline on its terminal, where it goes on with a conversation: three turns, of which each runs a tool.

CLIENTS_HOME=~/clients python3 install_and_run.py --test -m clients tests/clients/test_cline.py
"""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from tests.clients.conftest import Endpoints, installed
from tests.clients.model import ANSWER, NOTE, QUESTION
from tests.clients.screen import ENTER, Screen
from tests.clients.table import LAUNCHED
from tests.clients.talk import Line, Talk, efficiency

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]

SETTLES_S = 10


@pytest.mark.parametrize("port", [8080, 4000])
def test_cline_holds_three_turns_on_its_terminal(
    port: int, endpoints: Endpoints, clients_home: Path, tmp_path: Path
):
    agent = installed(LAUNCHED["cline"], clients_home)
    talk = Talk(agent, clients_home, endpoints.ports[port], endpoints.trace, tmp_path)
    before: Line | None = None
    with Screen(agent.command(clients_home, talk.place), talk.environment, talk.place.work) as screen:
        screen.wait(lambda text: "Auto-approve all disabled" in text)
        screen.look(SETTLES_S)
        for number in range(3):
            note = f"note-{secrets.token_hex(4)}"
            talk.put(NOTE, note.encode())
            screen.press(f"{QUESTION} ({number})", ENTER)
            screen.wait(lambda text: "Approve tool call?" in text)
            screen.press("y")
            screen.wait(lambda text, answers=number + 1: text.count(ANSWER) >= answers)
            lines = endpoints.trace.new_lines()
            share = efficiency(lines, before, has_asides=False)
            cached = min(line["cached_tokens"] / line["prompt_tokens"] for line in lines)
            print(
                f"cline on {port}, turn {number}: {len(lines)} requests, efficiency {share:.3f}, {cached:.3f}"
            )
            assert any(note in line["prompt"] for line in lines), "its tool ran"
            assert number == 0 or min(share, cached) >= 0.97
            before = lines[-1]
