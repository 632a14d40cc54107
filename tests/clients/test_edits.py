"""Real clients change files: Codex by a patch that follows a grammar, Claude Code by writing and editing.

CLIENTS_HOME=~/clients python install_and_run.py --test -m clients
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.clients.conftest import Endpoints, installed
from tests.clients.model import ANSWER, EDIT, PATCH, PATCHED, PATCHED_TEXT, WRITE
from tests.clients.table import AGENTS, LAUNCHED, MODEL, Place
from tests.clients.talk import Talk
from tests.proxy.tunnel import Tunnel

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]


def _with_patches(place: Place) -> Mapping[str, str]:
    """Codex offers patches to models that it knows. The server answers unknown names."""
    files = AGENTS["codex"].files(place)
    return {name: text.replace(json.dumps(MODEL), '"gpt-5.5"') for name, text in files.items()}


@pytest.mark.parametrize("port", [8080, 4000])
def test_codex_applies_a_patch(port: int, endpoints: Endpoints, clients_home: Path, tmp_path: Path):
    agent = replace(installed(AGENTS["codex"], clients_home), files=_with_patches)
    tunnel = Tunnel(endpoints.ports[port])
    talk = Talk(agent, clients_home, tunnel.port, endpoints.trace, tmp_path)
    turn, after = talk.say(PATCH), talk.ask()
    tunnel.close()
    (offered, *_), *_ = [
        [tool for tool in request.body["tools"] if tool.get("name") == "apply_patch"]
        for request in tunnel.heard("/v1/responses")
    ]
    assert offered["type"] == "custom"
    assert offered["format"]["syntax"] == "lark"
    assert turn.status == 0, turn.printed
    assert (talk.place.work / PATCHED).read_text() == f"{PATCHED_TEXT}\n"
    assert ANSWER in turn.printed
    assert ANSWER in after.printed
    assert min(after.efficiency, after.cached) >= 0.97, str(after)


@pytest.mark.parametrize("port", [8080, 4000])
def test_claude_code_writes_a_file_and_edits_it(
    port: int, endpoints: Endpoints, clients_home: Path, tmp_path: Path
):
    agent = installed(LAUNCHED["claude"], clients_home)
    talk = Talk(agent, clients_home, endpoints.ports[port], endpoints.trace, tmp_path)
    written, edited = talk.say(WRITE), talk.say(EDIT)
    for turn in (written, edited):
        print(turn)
        assert turn.status == 0, turn.printed
        assert ANSWER in turn.printed
    assert (talk.place.work / PATCHED).read_text() == f"{PATCHED_TEXT}\n".replace("Sing", "Hum")
    assert min(edited.efficiency, edited.cached) >= 0.97, str(edited)
