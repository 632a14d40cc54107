"""The simulated fleet counts what each server has to compute, no more and no less."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.fleet import (
    NOTHING,
    ROUTERS,
    Machine,
    SegmentCache,
    Session,
    Turn,
    by_prefix,
    by_session,
    play,
    recorded_sessions,
)
from scripts.agent_sessions import reduced

MACHINE = Machine(budget=10**9, prefill=1000, decode=10)


def turn(parent: int, shared: int, prompt: int, wait_s: float = 1.0, reply: int = 10) -> Turn:
    return Turn(wait_s, parent, shared, prompt, reply)


STEPS = (turn(NOTHING, 0, 300), turn(0, 300, 500), turn(1, 500, 800))
SESSION = Session(0, 100, STEPS)


def test_a_path_has_the_prompts_tokens_and_shares_its_parents():
    branch = Session(3, 100, (*STEPS, turn(1, 350, 360)))
    first, second, third, other = branch.paths(7)
    assert [sum(length for _, length in path) for path in (first, second, third, other)] == [
        300,
        500,
        800,
        360,
    ]
    assert first == (((-4, 0), 100), ((7, 0), 200))
    assert third[: len(second)] == second
    assert other == (*first, ((7, 1), 50), ((7, 3), 10)), (
        "350 tokens of the second request, and ten of its own"
    )


def test_a_cache_has_what_it_has_read_and_no_more():
    cache = SegmentCache()
    first, second, third = SESSION.paths(0)
    assert [cache.read(path) for path in (first, third, second, first)] == [0, 300, 500, 300]
    assert cache.tokens == 800


def test_a_part_of_a_segment_is_known_as_far_as_it_was_read():
    cache = SegmentCache()
    cache.read((((0, 0), 50),))
    assert cache.read((((0, 0), 80), ((0, 1), 10))) == 50
    assert cache.read((((0, 0), 80), ((0, 1), 10))) == 90


def test_the_ends_of_the_conversation_that_rests_longest_go_first():
    cache = SegmentCache(budget=1000)
    (_, _, long), (_, short, _) = SESSION.paths(0), SESSION.paths(1)
    cache.read(long)
    cache.read(short)
    assert cache.tokens <= 1000
    assert cache.read(short) == 500
    assert 100 <= cache.read(long) < 800


def test_one_server_computes_each_token_once_whoever_routes():
    for name, router in ROUTERS.items():
        outcome = play([SESSION], 5, 1, MACHINE, router())
        assert outcome.prompt == 5 * 1600
        assert outcome.computed == outcome.unavoidable == 100 + 5 * 700, name
        assert outcome.efficiency == 1


@pytest.mark.parametrize("router", [by_session, by_prefix])
def test_who_keeps_conversations_together_pays_for_instructions_alone(router):
    outcome = play([SESSION], 20, 4, MACHINE, router())
    assert outcome.unavoidable == 100 + 20 * 700
    assert outcome.computed == 4 * 100 + 20 * 700


def test_chance_computes_conversations_again():
    kept, random = (play([SESSION], 20, 4, MACHINE, ROUTERS[name]()) for name in ("prefix", "random"))
    assert random.efficiency < kept.efficiency < 1
    assert random.hit_rate < kept.hit_rate


def test_prompts_are_read_one_after_the_other_and_replies_beside():
    at_once = Session(0, 0, (turn(NOTHING, 0, 1000, reply=600_000),))
    outcome = play([at_once], 2, 1, Machine(budget=10**9, prefill=0.1, decode=1), by_session())
    shorter, longer = sorted(outcome.waits_s)
    assert shorter == pytest.approx(10_000)
    assert 19_000 < longer <= 20_000, "it waits for the other prompt, not for its reply"


def test_the_same_fleet_plays_the_same_again():
    first, second = (play(recorded_sessions(), 4, 2, MACHINE, ROUTERS["random"]()) for _ in range(2))
    assert first == second


def test_the_recorded_figures_are_whole():
    sessions = recorded_sessions()
    assert len(sessions) == 40
    for session in sessions:
        for number, request in enumerate(session.turns):
            assert NOTHING <= request.parent < number
            assert 0 <= request.shared <= request.prompt
            assert request.parent == NOTHING or request.shared <= session.turns[request.parent].prompt
            assert request.wait_s >= 0 and request.reply >= 0


def test_a_trace_is_reduced_to_figures():
    requests = [
        [0.0, "", 200, 5, 2.0, [[1, 3]]],
        [5.0, "", 330, 5, 1.0, [[1, 3], [10, 2]]],
        [5.5, "/agent_001", 64, 5, 1.0, [[20, 1]]],
        [9000.0, "", 256, 5, 1.0, [[1, 3], [30, 1]]],
    ]
    figures = reduced({"tool_tokens": 40, "system_tokens": 2, "block": 64, "requests": requests})
    assert figures == {
        "instructions": 42,
        "requests": [
            [0.0, -1, 0, 200, 5],
            [3.0, 0, 192, 330, 5],
            [0.0, -1, 0, 64, 5],
            [600.0, 1, 192, 256, 5],
        ],
    }


def test_the_recorded_figures_hold_numbers_alone():
    file = Path(__file__).resolve().parents[2] / "benchmarks" / "agent_sessions.json"
    for session in json.loads(file.read_text()):
        assert session.keys() == {"instructions", "requests"}
        assert all(isinstance(figure, int | float) for request in session["requests"] for figure in request)
