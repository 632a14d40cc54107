"""On a slow machine a start measures with few tokens, and takes what is safe where it cannot try."""

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from start_llm.cache.layers import Layers
from start_llm.config.settings import Settings
from start_llm.engine.cost import measure_sequence
from start_llm.engine.pace import Pace
from start_llm.engine.pacing import Chunk, ChunkPacer
from start_llm.engine.self_test import check_batching
from start_llm.engine.start_measurements import PATIENCE_S, PrefillMemoryCost, PrefillProfile, measure_work
from start_llm.models.loader import load
from start_llm.wiring.memory_plan import estimated_work
from tests.conftest import TinyModel
from tests.engine.harness import Wrapped

FAMILIES = ["qwen3", "gemma3_text", "qwen3_5", "gpt_oss", "glm4_moe_lite"]


ANY_COST = PrefillMemoryCost(1000.0)


class SlowMachine:
    """Computes on its own clock: a pass takes `pass_s`, and each of its tokens `token_s`."""

    def __init__(self, network: Any, pass_s: float, token_s: float, first_s: float = 0.0) -> None:
        self.passes: list[int] = []
        self.now = 0.0
        self._pace = Pace(pass_s, token_s)
        self._extra_s = first_s
        self.network = Wrapped(network, self._compute)

    def _compute(self, shape: tuple[int, ...]) -> None:
        tokens = shape[0] * shape[1]
        self.passes.append(tokens)
        self.now += self._pace.seconds(tokens) + self._extra_s
        self._extra_s = 0.0

    def measure(self, layers: Layers, estimated: PrefillMemoryCost = ANY_COST) -> PrefillProfile:
        return measure_work(self.network, layers, lambda: self.now, estimated=estimated)


@pytest.fixture
def network(tiny_model: TinyModel) -> Any:
    return load(tiny_model("qwen3", hidden=128, layers=2)).network


def test_two_chunks_tell_the_pace():
    pace = Pace.between(Chunk(1, 0, 3.0), Chunk(9, 1, 7.0))
    assert (pace.pass_s, pace.token_s) == (2.5, 0.5)
    assert pace.seconds(1, 4) == 2 * 2.5 + 5 * 0.5
    assert Pace.between(Chunk(1, 0, 4.0), Chunk(8, 1, 3.0)) == Pace(4.0, 0.0)
    assert Pace.between(Chunk(1, 0, 0.0), Chunk(2, 1, 4.0)).seconds(2) == 4.0


@pytest.mark.parametrize("token_s", [0.2, 2.0, 20.0, 200.0])
def test_measuring_is_over_in_seconds_or_after_few_tokens(network: Any, token_s: float):
    machine = SlowMachine(network, 0.0, token_s)
    measured = machine.measure(Layers(network))
    assert machine.now <= max(PATIENCE_S + 8, 8 * token_s)
    assert machine.now == pytest.approx(sum(machine.passes) * token_s)
    assert measured.pace.seconds(1) == pytest.approx(token_s)
    assert "was measured on" in measured.notice


def test_a_machine_that_needs_long_for_a_pass_and_not_for_a_token_measures_longer_chunks(network: Any):
    machine = SlowMachine(network, 2.6, 0.05)
    assert max(chunk.tokens for chunk in machine.measure(Layers(network)).chunks) >= 64
    assert machine.now < PATIENCE_S + 12


@pytest.mark.parametrize("pace", [(0.0, 0.001), (0.05, 0.0001), (0.2, 0.02)])
@pytest.mark.sample(2)
def test_a_fast_machine_measures_the_same_chunks_as_ever(network: Any, pace: tuple[float, float]):
    machine = SlowMachine(network, *pace)
    measured = machine.measure(Layers(network))
    asked = [(chunk.tokens, chunk.before) for chunk in measured.chunks]
    assert asked[:3] == [(64, 64), (64, 1088), (128, 1152)]
    assert measured.notice == ""


def test_a_first_pass_that_compiles_makes_no_machine_slow(network: Any):
    machine = SlowMachine(network, 0.01, 0.001, first_s=30.0)
    assert machine.measure(Layers(network)).notice == ""


@pytest.mark.thorough
@pytest.mark.checked(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_memory_that_few_tokens_do_not_tell_of_is_estimated_from_the_config(
    tiny_model: TinyModel, family: str
):
    model = load(tiny_model(family, hidden=128, layers=4))
    layers = Layers(model.network)
    estimated = estimated_work(Settings(), model.config)
    machine = SlowMachine(model.network, 0.0, 2.0)
    assert machine.measure(layers, estimated).cost == estimated
    # What servers of other tests let go of meanwhile makes the peak look lower.
    taken = max(measure_work(model.network, layers).cost.bytes_of(512, 2048) for _ in range(2))
    assert taken / 3 < estimated.bytes_of(512, 2048) < 4 * taken


def test_a_slow_machine_begins_with_chunks_that_it_can_compute(network: Any):
    """Without any measured one, the first chunk would have 256 tokens: minutes."""
    pacer = ChunkPacer(0.23)
    for chunk in SlowMachine(network, 0.0, 2.0).measure(Layers(network)).chunks:
        pacer.record(chunk)
    assert pacer.length(0, stalls=False, share_s=0.0) <= 16


# --------------------------------------------------------------------------------------------------- sequence


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sample(3)
def test_one_token_tells_the_cost_of_a_sequence_in_known_caches(tiny_model: TinyModel, family: str):
    network, passes = load(tiny_model(family, hidden=128, layers=4)).network, list[tuple[int, ...]]()
    layers = Layers(network)
    cost = measure_sequence(Wrapped(network, passes.append), layers.fresh())
    assert passes == [(1, 1)]
    caches = layers.fresh()
    for _ in range(3):
        network(mx.zeros((1, 100), dtype=mx.uint32), cache=caches)
    more = measure_sequence(network, caches)
    assert cost == more


class Unknown(KVCache): ...


class Appended:
    """An unknown class that grows by what is put into it."""

    def __init__(self) -> None:
        self.nbytes = 100

    @property
    def state(self) -> mx.array:
        return mx.array(self.nbytes)


def test_an_unknown_cache_is_estimated_rather_too_high_where_more_tokens_would_take_long(network: Any):
    layers = Layers(network)
    known, slow = measure_sequence(network, layers.fresh()), Pace(0.0, 2.0)
    passes = list[tuple[int, ...]]()
    counted = Wrapped(network, passes.append)
    cost = measure_sequence(counted, [Unknown() for _ in network.layers], slow)
    assert passes == [(1, 1), (1, 1)]
    for tokens in (1, 100, 10_000):
        assert known.bytes_of(tokens) <= cost.bytes_of(tokens)
    assert cost.bytes_of(10_000) < 1.1 * known.bytes_of(10_000)


def test_an_unknown_cache_that_grows_by_each_token_is_seen_to(network: Any):
    def feed(tokens: mx.array, cache: list[Appended]) -> mx.array:
        for layer in cache:
            layer.nbytes += 8 * tokens.size
        return tokens

    assert measure_sequence(feed, [Appended()], Pace(0.0, 2.0)).bytes_of(1000) == 8100


# ------------------------------------------------------------------------------------------------------ batch


def test_what_would_take_long_to_try_is_not_done_and_the_reason_is_reported(network: Any):
    passes = list[tuple[int, ...]]()
    wrapped, fresh = Wrapped(network, passes.append), Layers(network).fresh
    verdict = check_batching(wrapped, fresh, 4, pace=Pace(0.0, 2.0))
    assert not verdict.batches and not passes
    assert verdict.reason == "trying several at once would take about 298 s on this machine"
    assert check_batching(wrapped, fresh, 4, pace=Pace(0.2, 0.02)).batches and passes


@pytest.mark.parametrize("sequences", [2, 3, 4, 8])
@pytest.mark.sample(2)
def test_the_time_of_the_trial_is_that_of_its_passes(network: Any, sequences: int):
    machine = SlowMachine(network, 3.0, 1.0)
    assert check_batching(machine.network, Layers(network).fresh, sequences).batches
    predicted = check_batching(network, Layers(network).fresh, sequences, pace=Pace(3.0, 1.0)).reason
    assert predicted == f"trying several at once would take about {machine.now:.0f} s on this machine"
