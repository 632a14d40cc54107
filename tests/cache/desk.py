"""A prompt cache over fakes, and requests that are served from it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from start_llm.cache.eviction import EvictionLimits
from start_llm.cache.opening import OpenedSequence
from start_llm.cache.page_store import PageStore
from start_llm.cache.prompt_cache import PromptCache
from start_llm.telemetry.metrics import CacheMetrics
from tests.cache.fakes import FakeLayers
from tests.cache.integrity import check_cache

PAGE = 4
PLENTY = 10**9
NETWORKS = {"attention": (True, False), "hybrid": (True, True), "recurrent": (False, True)}
"""Name to whether it keeps something for every token, and whether it has state."""
ALL_NETWORKS = {**NETWORKS, "windows": (True, True)}
"""Also one whose states can be taken back by a few tokens."""
PROMPT = tuple(range(10, 29))
REPLY = (1, 2, 3)


class Clock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def prompt_cache(
    kind: str, limits: EvictionLimits, clock: Callable[[], float] | None = None
) -> tuple[PromptCache, FakeLayers]:
    """Without a clock, a second passes between any two looks at it."""
    has_trimmable, has_state = ALL_NETWORKS[kind]
    reach = 3 if kind == "windows" else None
    layers = FakeLayers(has_trimmable=has_trimmable, has_state=has_state, reach=reach)
    ticking = itertools.count(1).__next__
    cache = PromptCache(layers, limits=limits, page_size=PAGE, metrics=CacheMetrics(), clock=clock or ticking)
    return cache, layers


def is_pinned(cache: PromptCache) -> bool:
    """True if all that is left lies before a sequence that runs."""
    store = cache._store
    if store.checkpoints or any(not seq_cache.is_active for seq_cache in store.seq_caches):
        return False
    under_way = {id(page) for seq_cache in store.seq_caches for page in seq_cache.path}
    return all(id(page) in under_way for page in store.tree.pages())


@dataclass
class Desk:
    """A cache, and requests that are computed from their beginning to their end."""

    kind: str = "attention"
    budget: int = PLENTY
    max_conversations: int | None = 10**6
    cache_ttl_s: float | None = 0
    clock: Callable[[], float] | None = None

    def __post_init__(self) -> None:
        limits = EvictionLimits(
            budget_bytes=self.budget, max_conversations=self.max_conversations, cache_ttl_s=self.cache_ttl_s
        )
        self.cache, self.layers = prompt_cache(self.kind, limits, self.clock)

    @property
    def store(self) -> PageStore:
        return self.cache._store

    def limit(self, **limits: float | None) -> None:
        """Other limits from now on."""
        evictor = self.cache._evictor
        evictor.limits = replace(evictor.limits, **limits)
        self.cache.shrink()
        self.cache.tidy(0)
        check_cache(self.cache)

    def begin(self, ids: Sequence[int], boundaries: Sequence[int] = (), salt: bytes = b"") -> OpenedSequence:
        """Everything but the last token is computed."""
        peeked = self.cache.opener.peek(tuple(ids), salt, boundaries)
        opened = self.cache.opener.open(tuple(ids), salt, boundaries)
        assert opened.restored == peeked
        ends = [end for end in opened.checkpoint_positions if end < len(ids) - 1]
        for end in [*ends, len(ids) - 1]:
            self.compute(opened, ids[:end])
        return opened

    def compute(self, opened: OpenedSequence, ids: Sequence[int]) -> None:
        chunk = ids[len(opened.seq_cache.tokens) :]
        opened.seq_cache.caches[0].feed(chunk)
        self.cache.record_chunk(opened.seq_cache, chunk, keep_state=len(ids) in opened.checkpoint_positions)
        check_cache(self.cache)

    def end(self, opened: OpenedSequence, tokens: Sequence[int]) -> None:
        """`tokens` is the prompt and the reply."""
        opened.seq_cache.caches[0].feed(tokens[len(opened.seq_cache.tokens) :])
        self.cache.close(opened.seq_cache, opened.seq_cache.caches, tokens)
        check_cache(self.cache)
        self.cache.tidy(0)
        check_cache(self.cache)

    def tidy(self) -> None:
        """Until nothing is left to tidy. Each request does only a leaf of it."""
        while self.store.tree.untrimmed_runs:
            self.cache.tidy(0)
        check_cache(self.cache)

    def serve(self, ids: Sequence[int], reply: Sequence[int] = (), boundaries: Sequence[int] = ()) -> int:
        """Returns how many tokens were known."""
        lookups = self.metrics.reused_tokens
        self.end(self.begin(ids, boundaries), [*ids, *reply])
        return self.metrics.reused_tokens - lookups

    @property
    def metrics(self) -> CacheMetrics:
        return self.cache._metrics
