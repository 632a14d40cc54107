"""Random conversations with an engine that has a prompt cache, and what they are measured against.

Shared by `tests/cache/test_truth.py` and `benchmarks truth --only replies`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx_lm.generate import generation_stream

from start_llm.cache.eviction import EvictionLimits
from start_llm.cache.kv_format import PageFormat
from start_llm.cache.layers import Layers
from start_llm.cache.prompt_cache import PromptCache
from start_llm.core.events import Text
from start_llm.core.images import FIRST_IMAGE_TOKEN, ImageRun
from start_llm.engine.resources import EngineResources
from start_llm.telemetry.metrics import CacheMetrics
from tests.cache.integrity import check_cache
from tests.engine.harness import Stepper, Watched, engine_request
from tests.ties import Reference

PAGE = 32
PLENTY = 10**9
LONGEST = 420
VOCABULARY = 1500
MAX_STEPS = 2000
_NEAR = 1e-4
_WAYS = 40

type Tokens = tuple[int, ...]


def tokens(rng: random.Random, low: int, high: int) -> Tokens:
    return tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(low, high)))


# ------------------------------------------------------------------------------------------------ the engines


class Cached(Stepper):
    """A loop with a prompt cache, whose order is checked after every step.

    Args:
        kv: how pages are quantised; None: they are not.
    """

    def __init__(
        self, resources: EngineResources, budget: int = PLENTY, kv: PageFormat | None = None, **changes: Any
    ) -> None:
        self.cached = CacheMetrics()
        self.layers = layers_of(resources.network, kv)
        self.cache = PromptCache(
            self.layers,
            limits=EvictionLimits(budget_bytes=budget),
            page_size=PAGE,
            metrics=self.cached,
        )
        super().__init__(replace(resources, cache=self.cache), **changes)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            super().step()
            check_cache(self.cache)

    def say(
        self, prompt: Sequence[int], max_tokens: int = 4, boundaries: tuple[int, ...] = (), **more: Any
    ) -> Watched:
        watched = self.submit(engine_request(prompt, max_tokens, boundaries=boundaries, **more))
        self.finish(watched)
        return watched


def filled(layers: Layers, network: Any) -> list[Any]:
    """Caches that hold two tokens."""
    caches = layers.fresh()
    with mx.stream(generation_stream):
        network(mx.array([[1, 2]]), cache=caches)
        mx.eval([cache.state for cache in caches])
    return caches


def layers_of(network: Any, kv: PageFormat | None = None) -> Layers:
    layers = Layers(network)
    if kv:
        assert layers.quantize_pages(kv, filled(layers, network))
    return layers


def reference(plain: Stepper, prompt: Tokens, length: int, images: tuple[ImageRun, ...] = ()) -> Reference:
    """Return the reply of an engine without a cache, and by how much it was sure."""
    watched = plain.submit(engine_request(prompt, length, top_logprobs=2, images=images))
    plain.finish(watched)
    scored = [logprob.top for event in watched.seen if isinstance(event, Text) for logprob in event.logprobs]
    return Reference(tuple(watched.tokens), tuple(first.logprob - second.logprob for first, second in scored))


def memory_for(resources: EngineResources, length: int) -> int:
    """Bytes of the caches of a prompt."""
    layers = Layers(resources.network)
    caches = layers.fresh()
    resources.network(mx.array([[7] * length]), cache=caches)
    return layers.nbytes(caches)


def restored_difference(network: Any, cache: PromptCache, ids: Tokens, boundaries: tuple[int, ...]) -> float:
    """The largest one between all logits after a restored prompt, and those after a computed one.

    A prompt that is computed in other pieces gives other logits, for some prompts by more than 1e-4 (measured
    without any cache: 1.5e-4). So the nearest of several ways to compute it counts. `ids` are in the cache
    afterwards.
    """
    with mx.stream(generation_stream):
        opened = cache.opener.open(ids, b"", boundaries)
        seq_cache, done = opened.seq_cache, len(opened.seq_cache.tokens)
        for end in sorted(
            {*opened.checkpoint_positions, *range(done + 64, len(ids) - 1, 64), len(ids) - 1} - {done}
        ):
            new = ids[len(seq_cache.tokens) : end]
            network(mx.array([new]), cache=seq_cache.caches)
            cache.record_chunk(seq_cache, new, keep_state=end in opened.checkpoint_positions)
        restored = network(mx.array([ids[-1:]]), cache=seq_cache.caches)[0, -1]
        difference = min(_differences(network, ids, restored))
        cache.close(seq_cache, seq_cache.caches, ids)
        return difference


def _differences(network: Any, ids: Tokens, logits: mx.array) -> Iterator[float]:
    """From the last logits, computed at once, and if that is not near, in random pieces."""
    rng, cuts = random.Random(len(ids)), list[int]()
    for _ in range(_WAYS):
        difference = cast("float", mx.abs(logits - _computed(network, ids, cuts)).max().item())
        yield difference
        if difference < _NEAR:
            return
        cuts = _pieces(rng, ids)


def says_too(network: Any, ids: Tokens, token: int) -> bool:
    """True if `token` comes after `ids` in any of several ways to compute them without a cache.

    Where two experts are almost equally good, the way decides which one is taken, and logits are quite others
    (lesson 16).
    """
    rng = random.Random(len(ids))
    with mx.stream(generation_stream):
        ways = (_computed(network, ids, _pieces(rng, ids)) for _ in range(_WAYS))
        return any(mx.argmax(logits).item() == token for logits in ways)


def chunked(resources: EngineResources, turn: Turn) -> Iterator[Watched]:
    """What engines without a cache say that compute the prompt in other pieces.

    For prompts with images, which no network computes alone.
    """
    for longest in (512, 61, 48, 31, 17, 11, 7, 5):
        plain = Stepper(resources, longest_chunk=longest)
        watched = plain.submit(engine_request(turn.prompt, turn.length, top_logprobs=20, images=turn.images))
        plain.finish(watched)
        yield watched


def nearest_difference(resources: EngineResources, engine: Cached, turn: Turn) -> float:
    """The largest one between the likeliest next tokens' log-probabilities, restored and computed.

    Of several ways to compute the prompt, the nearest counts.
    """
    watched = engine.say(turn.prompt, 1, turn.boundaries, images=turn.images, top_logprobs=20)
    ours, smallest = likeliest(watched), float("inf")
    for other in chunked(resources, replace(turn, length=1)):
        theirs = likeliest(other)
        both = ours.keys() & theirs.keys()
        smallest = min(smallest, max((abs(ours[token] - theirs[token]) for token in both), default=1.0))
        if smallest < _NEAR:
            break
    return smallest


def likeliest(watched: Watched) -> dict[int, float]:
    """The log-probabilities of the likeliest first tokens of a reply."""
    first = next(event.logprobs[0] for event in watched.seen if isinstance(event, Text) and event.logprobs)
    return {candidate.token: candidate.logprob for candidate in first.top}


def _pieces(rng: random.Random, ids: Tokens) -> list[int]:
    return sorted(rng.sample(range(1, len(ids)), min(rng.randint(1, 6), len(ids) - 1)))


def _computed(network: Any, ids: Tokens, cuts: Sequence[int]) -> mx.array:
    """The last logits. The last token is fed alone, as in a decode step: some networks have a path for it."""
    caches = Layers(network).fresh()
    ends = sorted({*cuts, len(ids) - 1} - {0})
    for start, end in pairwise([0, *ends]):
        network(mx.array([ids[start:end]]), cache=caches)
    return network(mx.array([ids[-1:]]), cache=caches)[0, -1]


# ------------------------------------------------------------------------------------------------ the clients


@dataclass(eq=False)
class Turn:
    """One request, and after how many steps its client loses patience."""

    prompt: Tokens
    boundaries: tuple[int, ...]
    length: int
    patience: int | None
    images: tuple[ImageRun, ...] = ()
    watched: Watched = field(init=False)

    @property
    def is_over(self) -> bool:
        return self.watched.generation.cancelled or self.watched.ending is not None


def _continued(rng: random.Random, before: Tokens) -> Tokens:
    return (*before, *tokens(rng, 1, 90))


def _branch(rng: random.Random, before: Tokens) -> Tokens:
    return _continued(rng, before[: rng.randrange(len(before))])


def _edit(rng: random.Random, before: Tokens) -> Tokens:
    """Something in the middle is replaced, by more or less or nothing; what is behind it stays."""
    start = rng.randrange(len(before))
    return (*before[:start], *tokens(rng, 0, 9), *_continued(rng, before[start + rng.randint(1, 9) :]))


WAYS: Mapping[Callable[[random.Random, Tokens], Tokens], int] = {_continued: 6, _branch: 2, _edit: 1}
"""How a prompt is made from what was said before, and how often."""


class Picture(NamedTuple):
    """An image as it stands in a prompt: its run, and the tokens around it."""

    ids: Tokens
    run: ImageRun


def whole_images(ids: Tokens, runs: Iterable[ImageRun]) -> Tokens:
    """The prompt without those image tokens that are not a whole image."""
    known = {run.tokens[0]: run.tokens for run in runs}
    kept, place = list[int](), 0
    while place < len(ids):
        run = known.get(ids[place], ())
        if run and ids[place : place + len(run)] == run:
            kept += run
            place += len(run)
            continue
        if ids[place] < FIRST_IMAGE_TOKEN:
            kept.append(ids[place])
        place += 1
    return tuple(kept)


@dataclass
class Talkers:
    """Clients that begin, go on, branch off, edit, ask again and leave, most with the same beginnings.

    Attributes:
        pictures: what they send, if anything.
    """

    rng: random.Random
    pictures: Sequence[Picture] = ()
    threads: list[Tokens] = field(default_factory=list[Tokens])
    asked: list[Turn] = field(default_factory=list[Turn])

    def turn(self) -> Turn:
        if self.asked and self.rng.random() < 0.15:
            known = self.rng.choice(self.asked[-5:])
            prompt, boundaries = known.prompt, known.boundaries
        else:
            prompt = self.prompt()
            boundaries = self.boundaries(prompt)
        patience = self.rng.choice([0, 0, 1, 2, 3, 5, 7]) if self.rng.random() < 0.25 else None
        turn = Turn(prompt, boundaries, self.rng.randint(1, 9), patience, self.images_of(prompt))
        self.asked.append(turn)
        return turn

    def prompt(self) -> Tokens:
        """One that nobody has asked yet."""
        if len(self.threads) < 2 or self.rng.random() < 0.05:
            self.threads.append(tokens(self.rng, 40, 150))
        before = self.rng.choice(self.threads[-6:])
        if len(before) > LONGEST:
            before = self.threads[0]
        (way,) = self.rng.choices(list(WAYS), list(WAYS.values()))
        prompt = way(self.rng, before)
        return self._with_picture(prompt) if self.pictures else prompt

    def _with_picture(self, prompt: Tokens) -> Tokens:
        """Mend images that were cut, and send another one now and then."""
        mended = whole_images(prompt, [picture.run for picture in self.pictures])
        sent = self.rng.choice(self.pictures).ids if self.rng.random() < 0.4 else ()
        return (*mended, *sent, *tokens(self.rng, 1, 9))

    def images_of(self, prompt: Tokens) -> tuple[ImageRun, ...]:
        present = set(prompt)
        return tuple(picture.run for picture in self.pictures if picture.run.tokens[0] in present)

    def boundaries(self, prompt: Tokens) -> tuple[int, ...]:
        """Anywhere, and often just before the end, as in a prompt that ends by asking for a reply."""
        ends = set(self.rng.sample(range(1, len(prompt)), min(len(prompt) - 1, self.rng.randint(0, 3))))
        if self.rng.random() < 0.5:
            ends.add(max(1, len(prompt) - self.rng.randint(1, 4)))
        return tuple(sorted(ends))

    def heard(self, turn: Turn) -> None:
        self.threads.append((*turn.prompt, *turn.watched.tokens))
        if self.rng.random() < 0.3:
            self.threads.append(turn.prompt)


def talk(engine: Stepper, talkers: Talkers) -> list[Turn]:
    """One to four requests at once, not all in the same step, until all have ended or were given up."""
    turns = [talkers.turn() for _ in range(talkers.rng.choice([1, 1, 2, 3, 4]))]
    waiting = list(turns)
    running: list[Turn] = []
    for step in range(MAX_STEPS):
        if waiting and (not running or talkers.rng.random() < 0.6):
            running.append(waiting.pop(0))
            _ask(engine, running[-1], step)
        engine.step()
        for turn in running:
            turn.watched.look()
            if turn.patience is not None and step >= turn.patience and not turn.is_over:
                turn.watched.generation.cancel()
        running = [turn for turn in running if not turn.is_over]
        if not running and not waiting and not engine.is_busy:
            break
    else:
        raise AssertionError(f"not finished after {MAX_STEPS} steps")
    for turn in turns:
        talkers.heard(turn)
    return turns


def _ask(engine: Stepper, turn: Turn, step: int) -> None:
    turn.watched = engine.submit(
        engine_request(turn.prompt, turn.length, boundaries=turn.boundaries, images=turn.images)
    )
    turn.patience = None if turn.patience is None else step + turn.patience
