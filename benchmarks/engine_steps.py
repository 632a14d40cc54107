"""Steps and chunks of the engine, which runs on this thread: parts of `engine.py`."""

import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

from benchmarks.harness import alternate, medians, ratio, row, table
from benchmarks.networks import resources_of
from scripts import tiny_models, tiny_vision_models
from start_llm.core.events import Text
from start_llm.core.sampling import Sampling
from start_llm.engine.resources import EngineResources
from start_llm.models.loader import load
from tests.engine.harness import GREEDY, Stepper, engine_request

PROMPT, CHUNK = 512, 64
MOST_EYES, MOST_SAMPLING = 1.02, 1.03
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


def eyes(
    folder: Path,
    *,
    family: Annotated[str, tiny_vision_models.VISION_FAMILIES] = "qwen3_vl",
    rounds: int = 40,
    tokens: int = 160,
) -> Iterator[str]:
    """What eyes cost a text conversation: medians of a step and of a chunk, in milliseconds.

    The network is the same object in both, so whatever differs is the engine. A tiny model has short steps,
    in which the engine's own work counts most.

    Args:
        tokens: of each reply
    """
    model = load(tiny_vision_models.build(family, folder))
    seeing = lettered(resources_of(model, vision=model.vision))
    engines = [Stepper(part, longest_chunk=CHUNK) for part in (seeing, replace(seeing, vision=None))]
    gc.disable()  # so that no engine pays for what the other one leaves
    sides = (partial(_milliseconds, engine, GREEDY, tokens) for engine in engines)
    times = alternate(rounds, *sides, warm_up=2)
    gc.enable()
    table(" | with eyes | without | ratio")
    for place, name in enumerate(("chunk", "step")):
        pairs = [(with_eyes[place], without[place]) for with_eyes, without in times]
        row(f"ms of a {name}", *(f"{ms:.3f}" for ms in medians(pairs)), f"{ratio(pairs):.3f}")
        if name == "step" and ratio(pairs) > MOST_EYES:
            yield f"a step costs {ratio(pairs):.3f} times as much; the mark is {MOST_EYES}"


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
        hidden: width of the random model
    """
    if not model:
        tiny_models.build("qwen3", folder, hidden=hidden, layers=layers, vocab_size=vocabulary)
    engine = Stepper(lettered(resources_of(load(Path(model) if model else folder), 1, batches=False)))
    table("sampling | greedy, ms a step | sampled, ms a step | sampled / greedy | at most")
    for name, way in WAYS.items():
        sides = (partial(_milliseconds, engine, side, tokens) for side in (way, GREEDY))
        times = [(sampled[1], greedy[1]) for sampled, greedy in alternate(rounds, *sides, warm_up=1)]
        sampled, greedy = medians(times)
        most = f"{MOST_SAMPLING}" if name == DEFAULTS else ""
        row(name, f"{greedy:.3f}", f"{sampled:.3f}", f"{ratio(times):.3f}", most)
        if most and ratio(times) > MOST_SAMPLING:
            yield f"{name}: a step takes {ratio(times):.3f} of a greedy one, and not {most} at most"


def lettered(resources: EngineResources) -> EngineResources:
    """Each token is a letter: so each one is an event, whatever the vocabulary has."""
    return replace(resources, token_bytes=lambda _: b"a")


def _milliseconds(engine: Stepper, sampling: Sampling, tokens: int, number: int) -> tuple[float, float]:
    """Of a chunk of a prompt that nobody has asked yet, and the median of the steps of the reply to it."""
    prompt = [(number * 31 + place * 7) % 1500 for place in range(PROMPT)]
    began = time.perf_counter()
    watched = engine.submit(engine_request(prompt, tokens, sampling))
    engine.finish(watched, max_steps=10 * (PROMPT + tokens))
    times = [event.at for event in watched.seen if isinstance(event, Text)]
    gc.collect()
    steps = map(float.__sub__, times[1:], times)
    return 1000 * (times[0] - began) / (PROMPT / CHUNK), 1000 * statistics.median(steps)
