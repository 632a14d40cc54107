"""Prompts whose pages were quantised: what a network says behind them, beside what it says behind exact ones.

Shared by `tests/cache/test_kv_bits.py` and `benchmarks precision --only kv-bits kv-costs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import generation_stream

from start_llm.cache.arrays import KVSlice, StateSnapshot
from start_llm.cache.kv_format import PageFormat
from start_llm.cache.layers import Layers
from start_llm.cache.pages import PageRun
from start_llm.engine.resources import EngineResources
from tests.cache.conversations import Cached, layers_of
from tests.cache.integrity import check_cache


def packed_runs(engine: Cached) -> list[PageRun]:
    """All runs, once everything that is loose is tidied."""
    engine.cache.tidy(60)
    return list(engine.cache._store.tree._runs)


def interrupted(engine: Cached, prompt: tuple[int, ...], **more: Any) -> None:
    """Fill the cache with a prompt whose pages end up in a run: another one that begins like it went on."""
    engine.say(prompt, boundaries=(len(prompt) - 1,), **more)
    for seq_cache in list(engine.cache._store.seq_caches):
        engine.cache._store.split_into_pages(seq_cache)
    check_cache(engine.cache)


def log_probabilities(engine: Cached, ids: tuple[int, ...], known: int) -> mx.array:
    """Those of every token after the restored part of a prompt, [tokens, vocabulary]."""
    network = engine._resources.network
    with mx.stream(generation_stream):
        opened = engine.cache.opener.open(ids, b"", ())
        assert len(opened.seq_cache.tokens) >= known, "nothing was restored"
        del opened.seq_cache.tokens[known:]
        logits = network(mx.array([ids[len(opened.seq_cache.tokens) :]]), cache=opened.seq_cache.caches)[0]
        engine.cache.discard(opened.seq_cache)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def divergence(truth: mx.array, approximate: mx.array) -> float:
    """Mean KL divergence of log-probabilities [tokens, vocabulary], in nats."""
    return float((mx.exp(truth) * (truth - approximate)).sum(axis=-1).mean())


def behind(resources: EngineResources, ids: tuple[int, ...], known: int, kv: PageFormat | None) -> mx.array:
    """Those of the tokens behind the first `known`, which are restored from pages in this format."""
    engine = Cached(resources, kv=kv)
    interrupted(engine, ids[:known])
    assert packed_runs(engine), "there are no pages"
    restored = engine.cache.opener.peek(ids, b"", ()).tokens
    assert restored >= 0.9 * known
    return log_probabilities(engine, ids, restored)


# ----------------------------------------------------------------------------------------- without an engine


class Loss(NamedTuple):
    """What quantised pages change in what a network says.

    Attributes:
        divergence: mean KL divergence of the next tokens, in nats.
        same_top: share of the likeliest tokens that stay.
    """

    divergence: float
    same_top: float


def loss(truth: mx.array, approximate: mx.array) -> Loss:
    """Compare log-probabilities [tokens, vocabulary]."""
    same = (truth.argmax(axis=-1) == approximate.argmax(axis=-1)).astype(mx.float32).mean()
    return Loss(divergence(truth, approximate), float(same))


@dataclass(frozen=True)
class PromptBehindPages:
    """A prompt whose first tokens are computed once, and then restored from pages in any format.

    Attributes:
        exact: log-probabilities of the tokens behind them, [tokens, vocabulary].
    """

    network: Any
    layers: Layers
    kv: KVSlice
    state: StateSnapshot | None
    known: int
    rest: tuple[int, ...]
    exact: mx.array

    @classmethod
    def read(cls, network: Any, ids: tuple[int, ...], known: int) -> PromptBehindPages:
        """Compute the first `known` tokens, in pieces, and what comes next."""
        layers = Layers(network)
        caches = layers.fresh()
        with mx.stream(generation_stream):
            for start in range(0, known, 256):
                network(mx.array([ids[start : min(start + 256, known)]]), cache=caches)
                mx.eval([cache.state for cache in caches])
            kv = layers.cut(caches, 0, known)
            state = layers.state(caches) if layers.has_state else None
        return cls(network, layers, kv, state, known, ids[known:], _logprobs_of(network, ids[known:], caches))

    def behind(self, form: PageFormat) -> mx.array:
        """Return what comes next behind pages of this format, [tokens, vocabulary]."""
        layers = layers_of(self.network, form)
        with mx.stream(generation_stream):
            exact = self.kv.part(0, min(form.start, self.known))
            page = layers.page(self.kv.part(min(form.start, self.known), self.known), form.start)
            caches = layers.assemble([exact, page], self.state, self.known)
        return _logprobs_of(self.network, self.rest, caches)


def _logprobs_of(network: Any, ids: Sequence[int], caches: Sequence[Any]) -> mx.array:
    with mx.stream(generation_stream):
        logits = network(mx.array([ids]), cache=caches)[0].astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(logprobs)
    return logprobs
