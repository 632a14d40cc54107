"""One model type is asked everything that depends on its caches and on batches.

Shared by `tests/cache/test_model_types.py` and `benchmarks/truth_types.py`. The engine talks with a tiny
random float32 network, with a prompt cache and up to eight sequences at once. Each reply is compared with
that of an engine without a cache, which computes one row at a time:

- cold: a prompt that nobody has asked;
- next turn: prompt and reply, and something more;
- branch: another end after two thirds of the prompt;
- edit: three tokens inside of a page are others;
- return: the first conversation goes on;
- together: two to eight prompts of uneven lengths at once, and then the next turn of each, alone.

Tokens have to be equal up to near-ties (`tests/ties.py`). The logits after a restored prompt may differ from
those of a fresh computation by less than 0.0001, or by three times what pieces of other lengths make of them
without a cache. A type counts only if its logits change by at least 0.01 when a few tokens far from the end
of a prompt do: a network that hears nothing of its prompt proves nothing.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx

from start_llm.cache.eviction import EvictionLimits
from start_llm.cache.layers import Layers
from start_llm.cache.leaves import leaves
from start_llm.cache.prompt_cache import PromptCache
from start_llm.core.events import Finished
from start_llm.engine.resources import EngineResources
from start_llm.engine.self_test import check_batching
from tests.cache.conversations import PAGE, PLENTY, Tokens, reference, restored_difference, says_too, tokens
from tests.engine.harness import Stepper, Watched, Wrapped, engine_request, uncached_resources
from tests.ties import Tally

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
        """Ask. What raises is reported as wrong, and the next step begins with a fresh engine."""
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
        except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
            traceback.print_exc()
            self.finding.wrong.setdefault(step, f"{type(error).__name__}: {error}")

    def _alone(self) -> None:
        engine = self._engine()
        first = self._some(150)
        reply = self._ask(engine, "cold", first)
        onward = (*first, *reply, *self._some(30))
        reply = self._ask(engine, "next turn", onward)
        self._ask(engine, "branch", (*first[:100], *self._some(40)))
        self._ask(engine, "edit", (*first[:85], *self._some(3), *first[88:]))
        self._ask(engine, "return", (*onward, *reply, *self._some(20)))
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
                reply = self._check(TOGETHER, prompt, watched)
                self._ask(engine, TOGETHER, (*prompt, *reply, *self._some(9)))
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
        reply = self._check(step, prompt, watched)
        is_new = step == "cold" or not engine.cache.supports_reuse
        if isinstance(watched.ending, Finished) and not is_new and not watched.ending.usage.cached:
            self._is_wrong(step, f"nothing of {len(prompt)} tokens was known")
        return reply

    def _check(self, step: str, prompt: Tokens, watched: Watched) -> Tokens:
        reply = tuple(watched.tokens)
        if len(reply) != REPLY:
            self._is_wrong(step, f"{len(reply)} tokens and {watched.ending}")
        elif step not in self.finding.wrong:
            theirs = reference(self._plain, prompt, REPLY)

            def plain_says_too(place: int) -> bool:
                return says_too(self._network, (*prompt, *reply[:place]), reply[place])

            if difference := self._tally.difference(reply, theirs, plain_says_too):
                self._is_wrong(step, f"a prompt of {len(prompt)} tokens: {difference}")
        return reply

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
