"""Random requests with drafts beside the same without: part `law` of `benchmarks speculation`."""

import os
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import row, table
from benchmarks.networks import build_world
from tests.engine.drafted import Outcome, Play

os.environ["MLX_ENABLE_TF32"] = "0"  # the tie rule is that of float32, not of a GPU's shorter matrices

FAMILIES = ("qwen3", "qwen3_5", "gemma3_text", "gpt_oss", "glm4_moe_lite")
"""Plain, recurrent layers, windows twice, latent."""
EYES = ("qwen3_5",)
_REQUESTS = 40
"""Of one engine."""


def law(folder: Path, *, requests: int = 20_000, minutes: float = 60, first: int = 0) -> Iterator[str]:
    """Replies with drafts are those without, greedy and seeded, whatever happens meanwhile.

    Tiny random float32 models play with an engine that always drafts, from texts that a reply repeats but
    for a token now and then. Clients leave, interrupt each other, go on, edit, and share an engine with
    another tenant; every second engine has memory for about one prompt. Its cache is checked after every
    step. Each reply is compared token by token with that of an engine without drafts and cache: where they
    differ, an engine without drafts must say the other token too if it computes the same in other pieces, at
    most once for each 5,000 tokens.

    Args:
        requests: of all families together.
        minutes: after which it ends, though requests are left; each family plays with one engine at least.
        first: number of the first engine of each family.
    """
    end = time.monotonic() + 60 * minutes
    table(
        "family | engines | requests | given up | preempted | evictions | drafted | accepted | "
        "tokens compared | ties | wrong | seconds"
    )
    worlds = [(name, False) for name in FAMILIES] + [(name, True) for name in EYES]
    for number, (family, sees) in enumerate(worlds):
        left_s = (end - time.monotonic()) / (len(worlds) - number)
        yield from _family(folder, family, sees, requests // len(worlds), left_s, first)


def _family(folder: Path, family: str, sees: bool, requests: int, left_s: float, first: int) -> Iterator[str]:
    world = build_world(family, folder / ("eyes" if sees else "text"), images=sees)
    began, outcome, seed = time.monotonic(), Outcome(), first
    while outcome.requests < requests and (seed == first or time.monotonic() - began < left_s):
        try:
            Play(world.resources, seed, outcome, world.pictures).run(
                min(_REQUESTS, requests - outcome.requests)
            )
        except Exception:  # noqa: BLE001 - whatever breaks is reported, with the number of its engine
            outcome.wrong.append(f"engine {seed}: {traceback.format_exc()}")
        seed += 1
    row(
        f"{family}, images" if sees else family,
        *(seed - first, outcome.requests, outcome.given_up, outcome.preemptions, outcome.evictions),
        *(outcome.drafted, outcome.accepted, outcome.tally.tokens, outcome.tally.ties, len(outcome.wrong)),
        f"{time.monotonic() - began:.0f}",
    )
    yield from (f"{family}: {problem}" for problem in outcome.wrong)
    if not outcome.tally.has_rare_ties:
        yield f"{family}: {outcome.tally.ties} near-ties in {outcome.tally.tokens} tokens"
