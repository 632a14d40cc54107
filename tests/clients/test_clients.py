"""Real coding agents, three turns each: every turn runs a tool, and computes what it adds and no more.

CLIENTS_HOME=~/clients python3 install_and_run.py --test -m clients
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

from tests.clients.conftest import Endpoints, installed
from tests.clients.model import ANSWER
from tests.clients.table import AGENTS, HELD
from tests.clients.talk import Turn, converse
from tests.proxy.tunnel import Tunnel

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("port", [8080, 4000])
@pytest.mark.parametrize("name", HELD)
def test_three_turns(name: str, port: int, endpoints: Endpoints, clients_home: Path, tmp_path: Path):
    agent = installed(HELD[name], clients_home)
    turns: list[Turn] = []
    for turn in converse(agent, clients_home, endpoints.ports[port], endpoints.trace, tmp_path):
        print(f"{name} on {port}: {turn}")
        turns.append(turn)
        assert turn.status == 0, turn.printed
        assert ANSWER in turn.printed
        assert turn.has_read_the_note, turn.printed
    shares = [min(turn.efficiency, turn.cached) for turn in turns[1:]]
    assert min(shares) >= 0.97, "\n".join(map(str, turns))
    if None in (tries := [turn.tries for turn in turns]):
        warnings.warn(f"{name} could have reached other machines: no network namespace here", stacklevel=1)
    else:
        assert [number > 0 for number in tries if number is not None] == [agent.asks_its_maker] * 3, tries


def test_the_older_claude_changes_its_header_with_every_request(
    endpoints: Endpoints, clients_home: Path, tmp_path: Path
):
    """Without this, `test_three_turns` would say nothing about it."""
    agent, tunnel = installed(AGENTS["claude-2.1.126"], clients_home), Tunnel(endpoints.ports[8080])
    (turn,) = converse(agent, clients_home, tunnel.port, endpoints.trace, tmp_path, turns=1)
    tunnel.close()
    systems = [str(request.body["system"]) for request in tunnel.heard("/v1/messages")]
    marks = [mark for system in systems for mark in re.findall(r"cch=\w+", system)]
    assert turn.status == 0, turn.printed
    assert len(marks) == len(set(marks)) == len(turn.lines) == 2, marks
