"""Steps and chunks of one network, with eyes and without: a part of `engine.py`."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

from benchmarks.harness import alternate, medians, ratio, row, table
from benchmarks.networks import resources_of
from scripts import tiny_vision_models
from start_llm.models.loader import load
from tests.engine.harness import Stepper, engine_request

PROMPT, REPLY, CHUNK = 512, 160, 64
MARK = 1.02


def eyes(
    folder: Path,
    *,
    family: Annotated[str, tiny_vision_models.VISION_FAMILIES] = "qwen3_vl",
    rounds: int = 40,
) -> Iterator[str]:
    """What eyes cost a text conversation: medians of a step and of a chunk, in milliseconds.

    The network is the same object in both, so whatever differs is the engine. A tiny model has short steps,
    in which the engine's own work counts most.
    """
    model = load(tiny_vision_models.build(family, folder))
    seeing = resources_of(model, vision=model.vision)
    engines = [Stepper(part, longest_chunk=CHUNK) for part in (seeing, replace(seeing, vision=None))]
    gc.disable()  # so that no engine pays for what the other one leaves
    times = alternate(rounds, *(partial(_milliseconds, engine) for engine in engines), warm_up=2)
    gc.enable()
    table(" | with eyes | without | ratio")
    for place, name in enumerate(("chunk", "step")):
        pairs = [(with_eyes[place], without[place]) for with_eyes, without in times]
        row(f"ms of a {name}", *(f"{ms:.3f}" for ms in medians(pairs)), f"{ratio(pairs):.3f}")
        if name == "step" and ratio(pairs) > MARK:
            yield f"a step costs {ratio(pairs):.3f} times as much; the mark is {MARK}"


def _milliseconds(engine: Stepper, number: int) -> tuple[float, float]:
    """Of a chunk of a prompt that nobody has asked yet, and of a step of the reply to it."""
    prompt = [(number * 31 + place * 7) % 1500 for place in range(PROMPT)]
    watched = engine.submit(engine_request(prompt, REPLY))
    began = time.perf_counter()
    while not watched.tokens:
        engine.step()
    prefilled, begun = time.perf_counter(), len(watched.tokens)
    while watched.ending is None:
        engine.step()
        watched.look()
    ended = time.perf_counter()
    gc.collect()
    return 1000 * (prefilled - began) / (PROMPT / CHUNK), 1000 * (ended - prefilled) / (REPLY - begun)
