"""What eyes cost a text conversation: steps and chunks of one network, with eyes and without.

    python benchmarks/vision.py [--family NAME] [--rounds N]

The network is the same object in both, so whatever differs is the engine. A tiny model has short steps, in
which the engine's own work counts most. Both engines take turns, round by round, and the order changes with
each round. Printed are the medians of a round's mean step and chunk, and of their ratio; the mark is 1.02 for
a step.
Ends with status 1 if it is missed.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import servers  # noqa: E402 - found through the line above
from scripts import tiny_vision_models  # noqa: E402
from start_llm.core.openblas import run_with_openblas  # noqa: E402
from start_llm.engine.resources import EngineResources  # noqa: E402
from start_llm.models.loader import load  # noqa: E402
from tests.engine.harness import Stepper, engine_request, uncached_resources  # noqa: E402

PROMPT, REPLY, CHUNK = 512, 160, 64
MARK = 1.02


@dataclass
class Times:
    """Seconds of a step and of a chunk, one of each for each round."""

    steps: list[float] = field(default_factory=list[float])
    chunks: list[float] = field(default_factory=list[float])


def measure(engine: Stepper, times: Times, seed: int) -> None:
    """Compute a prompt that nobody has asked yet, and a reply to it."""
    prompt = [(seed * 31 + place * 7) % 1500 for place in range(PROMPT)]
    watched = engine.submit(engine_request(prompt, REPLY))
    began = time.perf_counter()
    while not watched.tokens:
        engine.step()
    prefilled = time.perf_counter()
    begun = len(watched.tokens)
    while watched.ending is None:
        engine.step()
        watched.look()
    ended = time.perf_counter()
    times.chunks.append((prefilled - began) / (PROMPT / CHUNK))
    times.steps.append((ended - prefilled) / (REPLY - begun))


def compare(resources: EngineResources, rounds: int) -> tuple[Times, Times]:
    """Return what both engines took: the one that sees, and the one that is blind."""
    engines = [
        Stepper(resources, longest_chunk=CHUNK) for resources in (resources, replace(resources, vision=None))
    ]
    times = (Times(), Times())
    gc.disable()  # so that no engine pays for what the other one leaves
    for number in range(rounds):
        for place in (0, 1) if number % 2 else (1, 0):
            measure(engines[place], times[place], number)
        gc.collect()
    gc.enable()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--family", choices=tiny_vision_models.VISION_FAMILIES, default="qwen3_vl")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = load(tiny_vision_models.build(options.family, Path(folder)))
    resources = uncached_resources(
        network=model.network,
        token_bytes=model.tokenizer.token_bytes,
        eos_token_ids=frozenset(),
        max_sequences=4,
        batches=True,
        vision=model.vision,
    )
    compare(resources, 2)  # warm up
    seeing, blind = compare(resources, options.rounds)
    print(f"{servers.machine('mlx', 'mlx-lm', 'mlx-vlm')}, float32\n")
    print(f"    python {shlex.join(sys.argv)}\n")
    print("| | with eyes | without | ratio |\n|---|---|---|---|")
    ratio = 0.0
    for name in ("chunks", "steps"):
        left, right = (median(getattr(times, name)) for times in (seeing, blind))
        ratio = median(
            one / other for one, other in zip(getattr(seeing, name), getattr(blind, name), strict=True)
        )
        print(f"| ms of {name} | {left * 1000:.3f} | {right * 1000:.3f} | {ratio:.3f} |")
    if ratio > MARK:
        sys.exit(f"a step costs {ratio:.3f} times as much; the mark is {MARK}")


if __name__ == "__main__":
    run_with_openblas()
    main()
