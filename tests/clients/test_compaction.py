"""Conversations that fill the window: each client compacts in time, goes on, and does not go in circles.

All they know of the window is what the launcher tells them.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.clients.conftest import Endpoints, installed, open_endpoints
from tests.clients.model import ANSWER, SUMMARY
from tests.clients.table import AGENTS, LAUNCHED, Agent
from tests.clients.talk import Line, Talk, Turn

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]

WINDOW = 40_000
MAX_TURNS = 8
MAX_REQUESTS = 6
"""Of a turn: the question, the result, and two compactions of up to two requests."""
LINES: Mapping[str, int] = {"claude": 100, "openclaw": 200, "pi": 300, "codex": 300, "opencode": 300}
"""Of the note, which is what fills the window: the clients' own prompts have 2,300 to 25,000 tokens."""


@pytest.fixture(scope="module")
def small_endpoints(clients_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Endpoints]:
    with open_endpoints(tmp_path_factory, max_kv_size=WINDOW) as endpoints:
        yield endpoints


def is_summary(line: Line) -> bool:
    return SUMMARY in line["reply"]


def answered(turn: Turn) -> Turn:
    print(turn)
    assert turn.status == 0, turn.printed
    assert ANSWER in turn.printed, turn.printed
    assert turn.has_read_the_note, turn.printed
    assert 2 <= len(turn.lines) <= MAX_REQUESTS, str(turn)
    assert {line["ending"] for line in turn.lines} <= {"stop", "tool_calls"}
    return turn


@pytest.mark.parametrize("port", [8080, 4000])
@pytest.mark.parametrize("name", LINES)
def test_a_conversation_that_fills_the_window_is_compacted_and_goes_on(
    name: str, port: int, small_endpoints: Endpoints, clients_home: Path, tmp_path: Path
):
    agent = installed(LAUNCHED[name], clients_home)
    talk = Talk(agent, clients_home, small_endpoints.ports[port], small_endpoints.trace, tmp_path)
    lines: list[Line] = []
    for _ in range(MAX_TURNS):
        lines += answered(talk.ask(LINES[name])).lines
        if any(map(is_summary, lines)):
            break
    lines += answered(talk.ask()).lines
    at = next(place for place, line in enumerate(lines) if is_summary(line))
    after = [line for line in lines[at + 1 :] if SUMMARY in line["prompt"] and not is_summary(line)]
    assert after, "nothing goes on from the summary"
    assert after[0]["prompt_tokens"] < max(line["prompt_tokens"] for line in lines[:at])


def test_codex_does_not_compact_after_every_step(
    clients_home: Path, tmp_path_factory: pytest.TempPathFactory
):
    """Its own prompt has three quarters of this window: more than a limit on all tokens could be."""
    agent = installed(LAUNCHED["codex"], clients_home)
    with open_endpoints(tmp_path_factory, max_kv_size=20_000) as endpoints:
        talk = Talk(
            agent, clients_home, endpoints.ports[8080], endpoints.trace, tmp_path_factory.mktemp("codex")
        )
        answered(talk.ask(10))
        answered(talk.ask(10))


class Overflow(NamedTuple):
    """The reaction of a client to a prompt that has become too long before it saw that.

    Attributes:
        agent: the client; one that is not launched does not know how small the window is.
        notes: lines of the notes. With the last one, the prompt is longer than the window.
        status: of its exit in that turn.
        says: what it prints then; an answer, if it compacts.
    """

    agent: Agent
    notes: Sequence[int]
    status: int = 0
    says: str = ANSWER


OVERFLOWS: Mapping[str, Overflow] = {
    "claude": Overflow(AGENTS["claude"], [250, 350]),
    "pi": Overflow(LAUNCHED["pi"], [550, 580]),
    "openclaw": Overflow(LAUNCHED["openclaw"], [200, 330]),
    # It compacts and answers, and its exit tells of the error all the same.
    "opencode": Overflow(LAUNCHED["opencode"], [450, 420], status=1),
    "codex": Overflow(AGENTS["codex"], [450, 450, 450], 1, "ran out of room in the model's context window"),
}


@pytest.mark.parametrize("port", [8080, 4000])
@pytest.mark.parametrize("name", OVERFLOWS)
def test_the_error_of_a_prompt_that_is_too_long_is_understood(
    name: str, port: int, small_endpoints: Endpoints, clients_home: Path, tmp_path: Path
):
    row = OVERFLOWS[name]
    agent = installed(row.agent, clients_home)
    talk = Talk(agent, clients_home, small_endpoints.ports[port], small_endpoints.trace, tmp_path)
    for lines in row.notes[:-1]:
        assert not any(map(is_summary, answered(talk.ask(lines)).lines))
    turn = talk.ask(row.notes[-1])
    print(turn)
    assert turn.status == row.status, turn.printed
    assert row.says in turn.printed, turn.printed
    assert any(map(is_summary, turn.lines)) == (row.says == ANSWER)
    assert len(turn.lines) <= MAX_REQUESTS
