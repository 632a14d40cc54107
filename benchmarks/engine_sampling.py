"""What sampling adds to a decode step: a part of `engine.py`.

One stream of the engine in this process decodes greedily and sampled in turn. The time of a step is the
median of those between the tokens of a reply.
"""

from __future__ import annotations

import statistics
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.harness import alternate, medians, ratio, row, table
from scripts import tiny_models
from start_llm.cache.layers import Layers
from start_llm.cache.prompt_cache import PromptCache
from start_llm.core.engine_request import EngineRequest
from start_llm.core.events import Failed, Finished, Text
from start_llm.core.prompt import ModelTokens
from start_llm.core.sampling import Sampling
from start_llm.engine.engine import Engine
from start_llm.engine.resources import EngineResources
from start_llm.models.loader import load
from start_llm.telemetry.metrics import EngineMetrics

PROMPT = tuple(range(100, 116))
PATIENCE_S = 600.0
MOST = 1.03
GREEDY = Sampling(temperature=0)
WARM = Sampling(temperature=1.0)
WAYS = {
    "top-k 40, top-p 0.9, min-p 0.05": WARM,
    "top-k 40": replace(WARM, top_p=0, min_p=0),
    "top-p 0.9": replace(WARM, top_k=0, min_p=0),
    "min-p 0.05": replace(WARM, top_k=0, top_p=0),
    "no filter": replace(WARM, top_k=0, top_p=0, min_p=0),
}
"""At temperature 1: the work of a step is the same at any other."""
DEFAULTS = next(iter(WAYS))


def _assembled(folder: Path) -> EngineResources:
    """As the server does it, but that each token is a letter, and none ends the reply."""
    model = load(folder)
    cache = PromptCache(Layers(model.network))
    return EngineResources(model.network, lambda _: b"a", frozenset(), 1, False, cache)


@contextmanager
def _engine(folder: Path) -> Generator[Engine]:
    engine = Engine(lambda: _assembled(folder), EngineMetrics(), max_waiting=1)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop(PATIENCE_S)


def _step_ms(engine: Engine, sampling: Sampling, tokens: int, _: int) -> float:
    request = EngineRequest(prompt=ModelTokens(PROMPT), max_tokens=tokens, sampling=sampling)
    generation = engine.submit(request)
    times: list[float] = []
    while True:
        for event in generation.take(PATIENCE_S):
            match event:
                case Text():
                    times.append(event.at)
                case Finished():
                    return 1000 * statistics.median(map(float.__sub__, times[1:], times))
                case Failed():
                    raise SystemExit(f"The engine failed: {event}")
                case _:
                    pass


def sampling(
    folder: Path,
    *,
    model: str = "",
    rounds: int = 9,
    tokens: int = 64,
    hidden: int = 256,
    layers: int = 2,
    vocabulary: int = 150_000,
) -> Iterator[str]:
    """The time of a decode step at one stream, sampled beside greedy.

    No more than 1.03 with the filters that requests get by default is demanded.

    Args:
        model: folder of a model; without it a random one is made
        tokens: of each reply
        hidden: width of the random model
    """
    if not model:
        tiny_models.build("qwen3", folder, hidden=hidden, layers=layers, vocab_size=vocabulary)
    table("sampling | greedy, ms a step | sampled, ms a step | sampled / greedy | at most")
    with _engine(Path(model) if model else folder) as engine:
        for name, way in WAYS.items():
            sides = (partial(_step_ms, engine, side, tokens) for side in (way, GREEDY))
            times = alternate(rounds, *sides, warm_up=1)
            sampled, greedy = medians(times)
            most = f"{MOST}" if name == DEFAULTS else ""
            row(name, f"{greedy:.3f}", f"{sampled:.3f}", f"{ratio(times):.3f}", most)
            if name == DEFAULTS and ratio(times) > MOST:
                yield f"{name}: a step takes {ratio(times):.3f} of a greedy one, and not {MOST} at most"
