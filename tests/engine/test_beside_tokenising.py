"""A reply goes on while another thread tokenises a long text: neither a lock nor the GIL is in its way."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from scripts import tiny_models
from start_llm.core.events import Text
from start_llm.core.sampling import Sampling
from start_llm.engine.engine import Engine
from start_llm.engine.generation import Generation
from start_llm.engine.resources import EngineResources
from start_llm.models.loader import load
from start_llm.models.tokenizer import Tokenizer
from start_llm.telemetry.metrics import EngineMetrics
from tests.engine.harness import engine_request, uncached_resources

MEGABYTE = " ".join(f"def f{number}(x): return x*{number}" for number in range(34_000))
ANYTHING = Sampling(temperature=2.0, seed=5)
"""Tokens that were never said before."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Tokenizer]]:
    folder = tiny_models.build("qwen3", tmp_path_factory.mktemp("tiny"), hidden=64, layers=1)
    tokenizers: list[Tokenizer] = []

    def assemble() -> EngineResources:
        model = load(folder)
        tokenizers.append(model.tokenizer)
        return uncached_resources(
            model.network, model.tokenizer.token_bytes, frozenset(), max_sequences=1, batches=True
        )

    engine = Engine(assemble, EngineMetrics(), max_waiting=4)
    engine.start()
    yield engine, tokenizers[0]
    engine.stop(5)


def longest_gap(generation: Generation, since: float, until: threading.Event) -> float:
    """Seconds without a token, from a moment to the first one after the event is set."""
    last, longest = since, 0.0
    while True:
        is_last = until.is_set()
        assert any(isinstance(event, Text) for event in generation.take(30))
        longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
        if is_last:
            return longest


@pytest.mark.thorough
def test_a_reply_goes_on_while_a_megabyte_is_tokenised(served: tuple[Engine, Tokenizer]):
    engine, tokenizer = served
    generation = engine.submit(engine_request(range(3, 50), 100_000, sampling=ANYTHING))
    while not any(isinstance(event, Text) for event in generation.take(30)):
        pass
    is_done, spent = threading.Event(), list[float]()

    def tokenise() -> None:
        began = time.perf_counter()
        assert len(tokenizer.encode(MEGABYTE, as_document=False)) > 300_000
        spent.append(time.perf_counter() - began)
        is_done.set()

    thread, since = threading.Thread(target=tokenise), time.perf_counter()
    thread.start()
    gap = longest_gap(generation, since, is_done)
    thread.join()
    generation.cancel()
    print(f"longest gap {1000 * gap:.0f} ms, tokenised in {spent[0]:.2f} s")
    assert len(MEGABYTE) > 990_000
    assert gap < spent[0] / 3  # about 20 ms of a second, and more on a machine that has other work
