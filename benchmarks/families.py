"""Check that every model type of mlx_lm answers rightly from its caches and in batches.

    python benchmarks/families.py [--only TYPE ...] [--write FILE] [--jobs N]

Builds a tiny random float32 network of each type (benchmarks/model_configs.py) and lets the engine talk with
it, with a prompt cache and up to eight sequences at once. Each reply is compared with that of an engine
without a cache, which computes one row at a time:

- cold: a prompt that nobody has asked;
- next turn: prompt and reply, and something more;
- branch: another end after two thirds of the prompt;
- edit: three tokens inside of a page are others;
- return: the first conversation goes on;
- together: two to eight prompts of uneven lengths at once, and then the next turn of each, alone.

Tokens have to be equal up to near-ties (tests/ties.py). The logits after a restored prompt may differ from
those of a fresh computation by less than 0.0001, or by three times what pieces of other lengths make of them
without a cache. A type counts only if its logits change by at least 0.01 when a few tokens far from the end
of a prompt do: a network that hears nothing of its prompt proves nothing.

Each type has a process of its own, so that one that breaks takes no other with it. The table goes to standard
output, or into FILE. Ends with status 1 if a type is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from start_llm.core.openblas import run_with_openblas  # noqa: E402

os.environ["MLX_ENABLE_TF32"] = "0"  # the limits are those of float32, not of a GPU's shorter matrices

import mlx.core as mx  # noqa: E402 - found through the line above

from benchmarks import servers  # noqa: E402
from benchmarks.model_configs import SET_ASIDE, model_types  # noqa: E402
from benchmarks.model_networks import build  # noqa: E402
from start_llm.cache.eviction import EvictionLimits  # noqa: E402
from start_llm.cache.layers import Layers, leaves  # noqa: E402
from start_llm.cache.prompt_cache import PromptCache  # noqa: E402
from start_llm.core.events import Finished  # noqa: E402
from start_llm.engine.resources import EngineResources  # noqa: E402
from start_llm.engine.self_test import check_batching  # noqa: E402
from tests.cache.conversations import (  # noqa: E402
    PAGE,
    PLENTY,
    Tokens,
    reference,
    restored_difference,
    says_too,
    tokens,
)
from tests.engine.harness import Stepper, Watched, Wrapped, engine_request, uncached_resources  # noqa: E402
from tests.ties import Tally  # noqa: E402

REPLY = 8
ROWS = 8
ALONE = ("cold", "next turn", "branch", "edit", "return")
TOGETHER = "together"
BATCHES = ((75, 10), (20, 90, 50), (33, 7, 64, 100), (12, 48, 49, 31, 80), (5, 110, 64, 32, 17, 40, 96, 71))
"""Lengths of prompts that are asked at once. Two rows are as many as there are heads for keys and values."""
MAX_DIFFERENCE = 1e-4
LEAST_FELT = 0.01
LOUD = 3.0
"""Times that a network's own difference, if it is computed in other pieces, may be exceeded."""


@dataclass
class Finding:
    """The findings about one type.

    Attributes:
        caches: classes of its caches.
        reuse: how far a prompt is taken up again: to the token, at checkpoints, none.
        widest: the most rows that one forward pass had.
        wrong: step to what is wrong in it, the first thing of each.
        felt: how far the logits change when something far away in the prompt does.
        difference: the largest one between logits after a restored and a computed prompt.
    """

    model_type: str
    caches: str = ""
    reuse: str = ""
    widest: int = 0
    wrong: dict[str, str] = field(default_factory=dict[str, str])
    felt: float = 0.0
    difference: float = 0.0
    tokens: int = 0
    ties: int = 0

    def row(self) -> str:
        batching = f"{self.widest} rows" if self.widest > 1 else "turns"
        marks = ("wrong" if step in self.wrong else "right" for step in (*ALONE, TOGETHER))
        cells = (self.model_type, self.caches, self.reuse, batching, *marks, f"{self.difference:.0e}")
        return f"| {' | '.join(cells)} |"


class Engine(Stepper):
    """The engine as it serves a network of this kind, but that no reply ends before its limit."""

    def __init__(self, network: Any, layers: Layers, batches: bool) -> None:
        self.widest = 0
        self.cache = self._cache_for(layers)
        resources = EngineResources(
            Wrapped(network, self._look), lambda _: b"x", frozenset(), ROWS, batches, self.cache
        )
        super().__init__(resources)

    @staticmethod
    def _cache_for(layers: Layers) -> PromptCache:
        limits = EvictionLimits(budget_bytes=PLENTY)
        return PromptCache(layers, limits=limits, page_size=PAGE)

    def _look(self, shape: tuple[int, ...]) -> None:
        self.widest = max(self.widest, shape[0])


def batches(network: Any) -> bool:
    """True if the engine lets rows of this network share a batch."""
    return check_batching(network, Layers(network).fresh, ROWS).batches


def plain(network: Any) -> Stepper:
    """An engine without a cache, for one row after the other."""
    return Stepper(uncached_resources(network, lambda _: b"x", frozenset(), 1, batches=False))


class Trial:
    """One type is asked everything.

    Args:
        together: lengths of prompts that are asked at once.
    """

    def __init__(
        self,
        model_type: str,
        network: Any,
        layers: Layers,
        together: Sequence[Sequence[int]] = BATCHES,
    ) -> None:
        self._network = network
        self._layers = layers
        self._lengths = together
        self._rng = random.Random(model_type)
        self._tally = Tally()
        self._plain = plain(network)
        self._batches = batches(network)
        self.finding = Finding(model_type, _classes(layers), _reuse(layers))

    def run(self) -> Finding:
        """Ask. What raises is told as wrong, and the next step begins with a fresh engine."""
        self.finding.felt = felt(self._network)
        if self.finding.felt < LEAST_FELT:
            self.finding.wrong["cold"] = f"it hears too little of its prompt: {self.finding.felt:.1e}"
        self._guarded(ALONE[-1], self._alone)
        self._guarded(TOGETHER, self._together)
        self.finding.tokens, self.finding.ties = self._tally.tokens, self._tally.ties
        return self.finding

    def _guarded(self, step: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told
            traceback.print_exc()
            self.finding.wrong.setdefault(step, f"{type(error).__name__}: {error}")

    def _alone(self) -> None:
        engine = self._engine()
        first = self._some(150)
        said = self._ask(engine, "cold", first)
        onward = (*first, *said, *self._some(30))
        said = self._ask(engine, "next turn", onward)
        self._ask(engine, "branch", (*first[:100], *self._some(40)))
        self._ask(engine, "edit", (*first[:85], *self._some(3), *first[88:]))
        self._ask(engine, "return", (*onward, *said, *self._some(20)))
        if engine.cache.supports_reuse:
            ids = (*onward, *self._some(50))
            self.finding.difference = restored_difference(self._network, engine.cache, ids, (len(ids) - 3,))
            if self.finding.difference >= max(MAX_DIFFERENCE, LOUD * noise(self._network, ids)):
                self._is_wrong("return", f"logits differ by {self.finding.difference:.1e}")

    def _engine(self) -> Engine:
        return Engine(self._network, self._layers, self._batches)

    def _together(self) -> None:
        engine = self._engine()
        for lengths in self._lengths:
            prompts = [self._some(length) for length in lengths]
            everyone = [self._submit(engine, prompt) for prompt in prompts]
            engine.finish(*everyone)
            for prompt, watched in zip(prompts, everyone, strict=True):
                said = self._check(TOGETHER, prompt, watched)
                self._ask(engine, TOGETHER, (*prompt, *said, *self._some(9)))
        self.finding.widest = engine.widest
        if engine.metrics.failures:
            self._is_wrong(TOGETHER, f"{engine.metrics.failures} passes raised, and rows went on alone")

    def _some(self, length: int) -> Tokens:
        return tokens(self._rng, length, length)

    def _submit(self, engine: Engine, prompt: Tokens) -> Watched:
        ends = {end for end in (60, len(prompt) - 3) if 0 < end < len(prompt)}
        return engine.submit(engine_request(prompt, REPLY, boundaries=tuple(sorted(ends))))

    def _ask(self, engine: Engine, step: str, prompt: Tokens) -> Tokens:
        watched = self._submit(engine, prompt)
        engine.finish(watched)
        said = self._check(step, prompt, watched)
        is_new = step == "cold" or not engine.cache.supports_reuse
        if isinstance(watched.ending, Finished) and not is_new and not watched.ending.usage.cached:
            self._is_wrong(step, f"nothing of {len(prompt)} tokens was known")
        return said

    def _check(self, step: str, prompt: Tokens, watched: Watched) -> Tokens:
        said = tuple(watched.tokens)
        if len(said) != REPLY:
            self._is_wrong(step, f"{len(said)} tokens and {watched.ending}")
        elif step not in self.finding.wrong:
            theirs = reference(self._plain, prompt, REPLY)

            def plain_says_too(place: int) -> bool:
                return says_too(self._network, (*prompt, *said[:place]), said[place])

            if difference := self._tally.difference(said, theirs, plain_says_too):
                self._is_wrong(step, f"a prompt of {len(prompt)} tokens: {difference}")
        return said

    def _is_wrong(self, step: str, what: str) -> None:
        self.finding.wrong.setdefault(step, what)


def felt(network: Any) -> float:
    """How far the last logits change if sixteen tokens do that are forty tokens away from the end."""
    rng = random.Random(1)
    prompt = tokens(rng, 100, 100)
    other = (*prompt[:44], *tokens(rng, 16, 16), *prompt[60:])
    caches = [Layers(network).fresh() for _ in range(2)]
    first, second = (
        network(mx.array([ids]), cache=cache)[0, -1]
        for ids, cache in zip((prompt, other), caches, strict=True)
    )
    return cast("float", mx.abs(first - second).max().item())


def noise(network: Any, ids: Tokens) -> float:
    """The largest difference of the last logits if a prompt is computed in pieces, and at once.

    Token by token too, as replies are: networks with MLA compute that in another way.
    """
    whole = Layers(network).fresh()
    expected = network(mx.array([ids]), cache=whole)[0, -1]
    return max(_in_pieces(network, ids, length, expected) for length in (1, 7, 19, 32, 64, 100))


def _in_pieces(network: Any, ids: Tokens, length: int, expected: mx.array) -> float:
    caches = Layers(network).fresh()
    logits = expected
    for start in range(0, len(ids), length):
        logits = network(mx.array([ids[start : start + length]]), cache=caches)[0, -1]
        mx.eval(logits)
    return cast("float", mx.abs(logits - expected).max().item())


def _classes(layers: Layers) -> str:
    return ", ".join(sorted({type(leaf).__name__ for leaf in leaves(layers.fresh())}))


def _reuse(layers: Layers) -> str:
    if layers.unknown:
        return "none"
    return "at checkpoints" if layers.has_state else "to the token"


def try_out(model_type: str) -> Finding:
    """Everything about one type, in this process."""
    network = build(model_type)
    return Trial(model_type, network, Layers(network)).run()


# ------------------------------------------------------------------------------------------------ all of them


def in_a_process(model_type: str) -> Finding:
    """Everything about one type; if its process breaks, that is what is found."""
    run = subprocess.run(
        [sys.executable, __file__, "--here", model_type], capture_output=True, text=True, check=False
    )
    print(f"{model_type}: status {run.returncode}", file=sys.stderr, flush=True)
    last = run.stdout.splitlines()[-1:] if run.returncode == 0 else []
    if not last:
        reason = (run.stderr.splitlines() or [f"status {run.returncode}"])[-1]
        return Finding(model_type, wrong=dict.fromkeys((*ALONE, TOGETHER), reason))
    return Finding(**json.loads(last[0]))


def report(findings: Iterable[Finding]) -> tuple[str, bool]:
    """The page, and whether nothing is wrong."""
    found = sorted(findings, key=lambda one: one.model_type.lower())
    columns = ("model type", "caches", "prompt cache", "batching", *ALONE, TOGETHER, "logits")
    lines = [
        "# Model types",
        "",
        "Written by `python benchmarks/families.py --write docs/model-types.md`, which says what is asked.",
        "Tiny random networks in float32. *Logits* is the largest difference between those after a restored",
        "prompt and those of a fresh computation.",
        "",
        f"{servers.machine('mlx', 'mlx-lm')}.",
        "",
        summary(found),
        "",
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(one.row() for one in found),
        "",
        "Not run:",
        "",
        *(f"- `{name}`: {reason}." for name, reason in SET_ASIDE.items()),
    ]
    wrong = [f"- `{one.model_type}`, {step}: {what}" for one in found for step, what in one.wrong.items()]
    if wrong:
        lines += ["", "Wrong:", "", *wrong]
    tally = Tally(sum(one.tokens for one in found), sum(one.ties for one in found))
    return "\n".join(lines) + "\n", not wrong and tally.has_rare_ties


def summary(found: Sequence[Finding]) -> str:
    """One line with counts."""
    right = sum(not one.wrong for one in found)
    reuse = {
        kind: sum(one.reuse == kind for one in found) for kind in ("to the token", "at checkpoints", "none")
    }
    reused = ", ".join(f"{count} {kind}" for kind, count in reuse.items())
    turns = sum(one.widest <= 1 for one in found)
    compared = sum(one.tokens for one in found)
    ties = sum(one.ties for one in found)
    return (
        f"{len(found)} types, {right} right, {len(found) - right} wrong. Prompt cache: {reused}. "
        f"{turns} take turns. {compared:,} tokens compared, {ties} near-ties."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", metavar="TYPE", choices=list(model_types()))
    parser.add_argument("--write", type=Path, metavar="FILE")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--here", metavar="TYPE", help="one type in this process, as JSON")
    options = parser.parse_args()
    if options.here:
        print(json.dumps(asdict(try_out(options.here))))
        return
    with ThreadPoolExecutor(options.jobs) as pool:
        page, is_right = report(pool.map(in_a_process, options.only or model_types()))
    if options.write:
        options.write.write_text(page, encoding="utf-8")
    print(page)
    if not is_right:
        sys.exit(1)


if __name__ == "__main__":
    run_with_openblas()
    main()
