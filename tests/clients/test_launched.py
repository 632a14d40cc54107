"""Clients that the launcher starts: they find the server, and leave alone what their user has set up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.clients.conftest import Endpoints, installed
from tests.clients.model import ANSWER, DELEGATE, SEARCH
from tests.clients.table import LAUNCHED
from tests.clients.talk import Talk

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]

OWN: Mapping[str, str] = {
    ".claude.json": '{"hasCompletedOnboarding": true}',
    ".claude/settings.json": '{"env": {"ANTHROPIC_BASE_URL": "http://192.0.2.1"}, "model": "elsewhere"}',
    ".codex/config.toml": 'model = "elsewhere"\nmodel_provider = "elsewhere"\n',
    ".config/opencode/opencode.json": '{"$schema": "https://opencode.ai/config.json", "model": "else/where"}',
    ".cline/data/settings/providers.json": '{"version": 1, "lastUsedProvider": "cline", "providers": {}}',
    ".continue/config.yaml": "models: [{name: elsewhere, provider: ollama, model: elsewhere}]\n",
    ".openclaw/openclaw.json": '{"agents": {"defaults": {"model": {"primary": "elsewhere/model"}}}}',
    ".pi/agent/settings.json": '{"defaultProvider": "elsewhere", "defaultModel": "model"}',
    ".qwen/settings.json": '{"model": {"name": "elsewhere"}}',
}
"""A user's own configuration, which leads elsewhere. opencode adds the schema itself."""
_PACKAGES = {".gitignore", "bun.lock", "node_modules", "package.json", "package-lock.json"}
"""opencode's, for plugins, wherever a configuration of it stands."""


@pytest.mark.parametrize("port", [8080, 4000])
@pytest.mark.parametrize("name", LAUNCHED)
def test_a_launched_client_works_and_leaves_its_users_folders_alone(
    name: str, port: int, endpoints: Endpoints, clients_home: Path, tmp_path: Path
):
    agent = installed(LAUNCHED[name], clients_home)
    with_own = replace(agent, files=lambda place: {**agent.files(place), **OWN})
    talk = Talk(with_own, clients_home, endpoints.ports[port], endpoints.trace, tmp_path)
    turns = [talk.ask(), talk.ask()]
    for turn in turns:
        print(f"{name} on {port}: {turn}")
        assert turn.status == 0, turn.printed
        assert ANSWER in turn.printed
        assert turn.has_read_the_note, turn.printed
        assert turn.tries is None or (turn.tries > 0) == agent.asks_its_maker, turn.tries
    assert min(turns[1].efficiency, turns[1].cached) >= 0.97, str(turns[1])
    assert dict(_users_own(talk.place.home)) == OWN


def test_sub_agents_and_late_tools_cost_the_conversation_nothing(
    endpoints: Endpoints, clients_home: Path, tmp_path: Path
):
    """Sub-agents run at once, in the same session; a tool that is found late is one of the others then."""
    agent = installed(LAUNCHED["claude"], clients_home)
    talk = Talk(agent, clients_home, endpoints.ports[8080], endpoints.trace, tmp_path)
    first, *turns = talk.ask(), talk.say(DELEGATE), talk.say(SEARCH), talk.ask()
    for turn in (first, *turns):
        print(turn)
        assert turn.status == 0, turn.printed
        assert ANSWER in turn.printed
    delegated, searched, last = turns
    assert len(delegated.lines) == 2 + 2 * 2, str(delegated)
    asked, followup = searched.lines
    assert ["notebook_path" in line["prompt"] for line in (asked, followup)] == [False, True]
    assert min(turn.efficiency for turn in turns) >= 0.97
    assert last.cached >= 0.97


def _users_own(home: Path) -> Iterator[tuple[str, str]]:
    """The files in the folders that are the user's."""
    folders = {Path(name).parts[0] for name in OWN}
    for path in (path for path in home.rglob("*") if path.is_file()):
        inside = path.relative_to(home)
        if inside.parts[0] in folders and not _PACKAGES.intersection(inside.parts):
            yield str(inside), path.read_text()
