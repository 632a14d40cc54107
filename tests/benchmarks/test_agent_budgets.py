"""What a cache of a size has to compute of recorded sessions is counted block by block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.agent_budgets import best_possible, least_recently_used, ours, prompts_of, unavoidable

BLOCK = 64
ONE_SESSION: dict[str, Any] = {
    "instructions": 5 * BLOCK,
    "requests": [
        [0.0, -1, 0, 640, 128],
        [5.0, 0, 640, 1024, 0],  # goes on from the reply
        [5.0, 1, 400, 640, 0],  # another agent, with the same instructions
    ],
}


def alone(blocks: int, requests: int, wait_s: float) -> dict[str, Any]:
    """A session that repeats its prompt."""
    tokens = blocks * BLOCK
    return {
        "instructions": 0,
        "requests": [[0.0, -1, 0, tokens, 0], *([[wait_s, 0, tokens, tokens, 0]] * (requests - 1))],
    }


def computed(sessions: Sequence[dict[str, Any]], at_once: int, most: int) -> tuple[int, int]:
    prompts = prompts_of(sessions, at_once, BLOCK)
    return least_recently_used(prompts, most).computed, best_possible(prompts, most).computed


def test_a_reply_is_not_computed_again_and_a_common_beginning_neither():
    prompts = prompts_of([ONE_SESSION], 1, BLOCK)
    assert [prompt.at for prompt in prompts] == [0, 5, 10]
    assert [prompt.length for prompt in prompts] == [10, 16, 10]
    assert [prompt.ends for prompt in prompts] == [(5, 9), (5, 9, 12, 15), (5, 9)]
    assert unavoidable(prompts) == 10 + 4 + 5


def test_what_is_not_kept_is_computed_again():
    assert computed([ONE_SESSION], 1, 0) == (10 + 16 + 10, 10 + 16 + 10)


def test_a_cache_for_one_prompt_serves_sessions_in_turn_but_not_at_once():
    sessions = [alone(10, 5, 10.0), alone(10, 5, 10.0)]
    assert computed(sessions, 1, 10) == (2 * 14, 2 * 14)
    oldest, best = computed(sessions, 2, 10)
    assert oldest == 10 * 10
    assert best < 8 * 10


def test_ends_go_before_beginnings():
    sessions = [alone(10, 2, 10.0), alone(10, 1, 1.0)]
    assert computed(sessions, 2, 15) == (10 + 10 + 5, 10 + 10 + 1)


@pytest.mark.parametrize("at_once", [1, 3])
def test_no_cache_computes_less_than_the_best_which_computes_no_more_with_more_memory(at_once):
    sessions = [*(alone(10 * (1 + number % 3), 6, 5.0 + number) for number in range(7)), ONE_SESSION]
    prompts = prompts_of(sessions, at_once, BLOCK)
    counts = [computed(sessions, at_once, 5 * more) for more in range(30)]
    assert all(best <= oldest for oldest, best in counts)
    bests = [best for _, best in counts]
    assert bests == sorted(bests, reverse=True)
    assert bests[-1] == unavoidable(prompts)


def test_what_enters_is_counted_each_time():
    prompts = prompts_of([alone(10, 5, 10.0), alone(10, 5, 10.0)], 2, BLOCK)
    assert least_recently_used(prompts, 20).entered == 20
    assert least_recently_used(prompts, 10).entered == 100


@pytest.mark.parametrize("network", ["attention", "hybrid"])
def test_with_enough_memory_the_servers_cache_computes_what_is_unavoidable_and_without_any_all(network):
    prompts = prompts_of([ONE_SESSION, alone(10, 5, 10.0)], 2, BLOCK)
    assert ours(prompts, 1000, network) == unavoidable(prompts)
    assert ours(prompts, 0, network) == sum(prompt.length for prompt in prompts)
