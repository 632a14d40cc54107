"""The memory and time of a prompt's chunk while it is computed, and the longest chunk that they allow."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

from start_llm.cache.layers import Layers
from start_llm.engine import start_measurements
from start_llm.engine.pacing import LONGEST_CHUNK, Chunk
from start_llm.engine.start_measurements import PrefillMemoryCost, measure_work
from start_llm.models.loader import load
from tests.conftest import TinyModel
from tests.engine.harness import Wrapped
from tests.engine.test_slow_start import SlowMachine

COST = PrefillMemoryCost(token_bytes=1000, pair_bytes=2, before_bytes=50)


def test_bytes_of_a_chunk_and_of_what_stands_before_it():
    assert COST.bytes_of(10, 0) == 10_000
    assert COST.bytes_of(10, 100) == 10_000 + 2_000 + 5_000


def test_the_longest_chunk_shrinks_as_the_context_grows_and_never_vanishes():
    lengths = [COST.longest(500_000, before) for before in (0, 100, 1000, 10_000, 10**6)]
    assert lengths == [500, 412, 150, 16, 16]
    assert COST.longest(10**12, 0) == LONGEST_CHUNK


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_5", "gpt_oss", "glm4_moe_lite"])
@pytest.mark.thorough
def test_what_is_measured_on_short_chunks_tells_what_a_long_one_takes(tiny_model: TinyModel, family: str):
    network = load(tiny_model(family, hidden=128, layers=4)).network
    cost = measure_work(network, Layers(network)).cost
    caches = make_prompt_cache(network)
    for _ in range(4):
        network(mx.zeros((1, 512), dtype=mx.uint32), cache=caches)
        mx.eval([cache.state for cache in caches])
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    network(mx.zeros((1, 512), dtype=mx.uint32), cache=caches)
    mx.eval([cache.state for cache in caches])
    taken = mx.get_peak_memory() - before
    assert 0.4 * taken < cost.bytes_of(512, 2048) < 3 * taken


def test_scores_that_are_written_down_cost_for_each_pair(tiny_model: TinyModel):
    """On a CPU attention is not fused."""
    network = load(tiny_model("qwen3", hidden=128, layers=2)).network
    assert measure_work(network, Layers(network)).cost.pair_bytes > 0


def test_the_chunks_were_timed(tiny_model: TinyModel):
    network = load(tiny_model("qwen3", hidden=128, layers=2)).network
    now = iter(range(1000))
    chunks = measure_work(network, Layers(network), lambda: float(next(now))).chunks
    assert [(chunk.tokens, chunk.before, chunk.seconds) for chunk in chunks] == [
        (64, 64, 1.0),
        (64, 1088, 1.0),
        (128, 1152, 1.0),
        (512, 1280, 1.0),
    ]


def test_a_long_chunk_is_not_tried_where_it_would_take_seconds(tiny_model: TinyModel):
    network = load(tiny_model("qwen3", hidden=128, layers=2)).network
    now = [0.0]

    def takes_long(shape: tuple[int, ...]) -> None:
        now[0] += shape[1] / 150

    chunks = measure_work(Wrapped(network, takes_long), Layers(network), lambda: now[0]).chunks
    assert [chunk.tokens for chunk in chunks] == [64, 64, 128]


@pytest.mark.thorough
def test_a_slow_device_has_the_same_costs_in_memory(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch):
    """A machine that was busy at the start keeps the same number of bytes free for computing."""

    def taken(chunk: Chunk) -> int:
        return COST.bytes_of(chunk.tokens, chunk.before) + (10**6 if chunk.tokens > 128 else 0)

    compute = start_measurements._Probe.compute
    monkeypatch.setattr(
        start_measurements._Probe,
        "compute",
        lambda *asked: start_measurements._Tried(chunk := compute(*asked).chunk, taken(chunk)),
    )
    network = load(tiny_model("qwen3")).network
    slow, fast = (
        SlowMachine(network, 0.0, token_s).measure(Layers(network)) for token_s in (1 / 40, 1 / 1000)
    )
    assert len(slow.chunks) < len(fast.chunks)
    assert slow.cost == fast.cost
    assert slow.cost.bytes_of(2048, 30_000) == pytest.approx(COST.bytes_of(2048, 30_000), rel=0.2)


@pytest.mark.thorough
def test_a_cache_of_an_unknown_class_is_tried_as_it_is(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
):
    """Nothing of it can be repeated, so less stands before its chunks."""
    network = load(tiny_model("qwen3")).network

    class Unknown(KVCache): ...

    monkeypatch.setattr(network, "make_cache", lambda: [Unknown() for _ in network.layers], raising=False)
    layers = Layers(network)
    assert layers.unknown
    measured = measure_work(network, layers)
    assert [chunk.tokens for chunk in measured.chunks][:3] == [64, 64, 128]
    assert measured.cost.bytes_of(LONGEST_CHUNK, 0) > 0
