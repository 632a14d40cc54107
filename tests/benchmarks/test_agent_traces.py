"""Recorded sessions are played as a client plays them, and charged with what no server can avoid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.agent_traces import LEAST_EFFICIENCY, PAGE, Session, in_time, play
from scripts import tiny_models
from tests.agents.agent_account import Ledger, Rendering
from tests.serving import serving

RECORDED: list[dict[str, Any]] = [
    {
        "instructions": 4800,
        "block": 64,
        "requests": [
            [0.0, -1, 0, 9600, 640],
            [5.0, 0, 9600, 12800, 320],
            [30.0, 1, 4800, 9600, 320],  # another agent, with the same instructions
            [1.0, 1, 12800, 16000, 64],
        ],
    },
    {"instructions": 3200, "block": 64, "requests": [[0.0, -1, 0, 6400, 64], [20.0, 0, 6400, 9600, 64]]},
]
SCALE = 64


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build(request.param, tmp_path_factory.mktemp("model"), hidden=64, layers=4)


def test_sessions_that_run_at_once_take_turns_by_their_times():
    assert list(in_time(RECORDED, 2)) == [(0, 0), (0, 1), (5, 0), (20, 1), (35, 0), (36, 0)]
    assert list(in_time(RECORDED, 1)) == [(0, 0), (5, 0), (35, 0), (36, 0), (36, 1), (56, 1)]


def test_a_session_goes_on_from_the_reply_or_from_the_messages_that_were_shared(model):
    rendering = Rendering(model)
    session = Session(0, RECORDED[0], SCALE, Ledger(rendering), rendering)
    asked = [session.ask(lambda _: {"role": "assistant", "content": "It is done."}) for _ in range(4)]
    first, second, third, fourth = (request.messages for request in asked)
    assert [message["role"] for message in first] == ["system", "user"]
    assert second[:3] == [*first, {"role": "assistant", "content": "It is done."}]
    assert third[0] == first[0] and third[1] != first[1]
    assert fourth[: len(second)] == second
    lengths = [len(rendering.encode(message["content"])) for message in (*first, second[-1])]
    assert lengths == pytest.approx([75, 75, 40], abs=12)


@pytest.mark.thorough
def test_nothing_of_a_session_is_computed_twice(model, tmp_path):
    with serving(model, state_root=str(tmp_path), block_size=PAGE) as server:
        played = play(server, Rendering(model), RECORDED, 2, SCALE)
    assert played.requests == 6
    assert played.unavoidable < played.prompt / 1.5
    assert played.efficiency >= LEAST_EFFICIENCY
