"""A sequence's cost is known before it is computed; memory that the machine lacks is read as reported."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest

from start_llm.cache.layers import Layers
from start_llm.cache.leaves import leaves
from start_llm.engine.admission import shortage
from start_llm.engine.cost import SequenceCost, WindowCost, measure_sequence
from start_llm.models.loader import load
from tests.conftest import TinyModel

PLENTY = 10**15


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_5", "gpt_oss", "glm4_moe_lite"])
@pytest.mark.thorough
def test_the_cost_of_a_prompt_is_what_its_caches_then_hold(tiny_model: TinyModel, family: str):
    model = load(tiny_model(family, hidden=128, layers=4))
    layers = Layers(model.network, room=4)
    cost = measure_sequence(model.network, layers.fresh())
    for length in (20, 300, 900):
        caches = layers.fresh()
        for start in range(0, length, 100):
            model.network(mx.array([[7] * min(100, length - start)]), cache=caches)
            mx.eval([leaf.state for leaf in leaves(caches)])
        # A window that was passed by a chunk holds the chunk's end too, until the next one.
        assert cost.bytes_of(length) == pytest.approx(
            layers.nbytes(caches), rel=0.02, abs=130 * per_token(cost)
        )


def per_token(cost: SequenceCost) -> int:
    return cost.token_bytes + sum(window.token_bytes for window in cost.windows)


COST = SequenceCost(100, (WindowCost(10, 50),), 7)


def test_bytes_by_the_kind_of_layer():
    assert [COST.bytes_of(tokens) for tokens in (0, 10, 50, 100)] == [7, 1107, 5507, 10507]


@pytest.mark.parametrize("tokens", [0, 1, 49, 50, 51, 1000, 10**6])
def test_the_longest_sequence_is_the_last_that_fits(tokens: int):
    assert COST.tokens_in(COST.bytes_of(tokens)) == tokens
    assert COST.tokens_in(COST.bytes_of(tokens + 1) - 1) == tokens


def test_no_memory_is_no_token():
    assert COST.tokens_in(-1) == 0


def lacks(nbytes: int) -> Callable[[], int]:
    return lambda: nbytes


def test_a_machine_with_memory_lacks_none():
    assert shortage(PLENTY, lacks(0)) == 0


def test_what_others_lack_is_given_back():
    assert shortage(PLENTY, lacks(20_000)) == 20_000


def test_what_is_held_for_later_use_goes_before_anything_is_missed(monkeypatch: pytest.MonkeyPatch):
    held = [5000]
    monkeypatch.setattr(mx, "get_active_memory", lambda: 9000)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: held[0])
    monkeypatch.setattr(mx, "clear_cache", lambda: held.__setitem__(0, 0))
    assert shortage(20_000, lacks(0)) == 0
    assert held == [5000]
    assert shortage(10_000, lacks(0)) == 0
    assert held == [0]
    assert shortage(8000, lacks(0)) == 1000


def test_where_nobody_tells_only_our_own_count():
    assert shortage(PLENTY, lacks(0)) == 0
    held = mx.ones((1000,))
    mx.eval(held)
    assert shortage(0, lacks(0)) >= 4000
