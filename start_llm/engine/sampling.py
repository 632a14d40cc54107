"""Choosing the next token. Everything here runs on the engine thread.

Ours instead of mlx_lm's: its filters are compiled against the global random state, so one exception inside
them leaves that state unusable for the whole process (lesson 1), and its seeds are global to a thread.
Here each request has a key of its own, so its choices do not depend on who shares the batch.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx

from start_llm.core.events import ScoredToken, TokenLogprobs
from start_llm.core.sampling import Sampling

type Sampler = Callable[[mx.array], mx.array]
"""Log-probabilities [rows, vocabulary] to token ids [rows]."""

type LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
"""All tokens so far [n] and logits [1, vocabulary] to logits [1, vocabulary]."""

_MASKED = float("-inf")
_SEED_BITS = 64


def greedy(logprobs: mx.array) -> mx.array:
    """The most likely token. One function for all rows, so that a greedy batch is sampled in one call."""
    return mx.argmax(logprobs, axis=-1)


def make_sampler(sampling: Sampling) -> Sampler:
    """`greedy`, or a sampler with a random key of its own."""
    return greedy if sampling.is_greedy else RandomSampler(sampling)


class RandomSampler:
    """Temperature, then top-k, top-p and min-p: the order that authors' generation_config.json assumes."""

    def __init__(self, sampling: Sampling) -> None:
        seed = secrets.randbits(_SEED_BITS) if sampling.seed is None else sampling.seed % 2**_SEED_BITS
        self._sampling = sampling
        self._key = mx.random.key(seed)

    def __call__(self, logprobs: mx.array) -> mx.array:
        scaled = logprobs.astype(mx.float32) / self._sampling.temperature
        if 0 < self._sampling.top_k < scaled.shape[-1]:
            ids = _top_k_ids(scaled, self._sampling.top_k)
            place = self._draw(mx.take_along_axis(scaled, ids, axis=-1))
            return mx.take_along_axis(ids, place[:, None], axis=-1)[:, 0]
        return self._draw(scaled)

    def _draw(self, scores: mx.array) -> mx.array:
        """One index for each row of `scores` [rows, candidates]."""
        probabilities = mx.softmax(scores, axis=-1)
        if 0 < self._sampling.top_p < 1:
            scores = mx.where(
                probabilities < _nucleus_floor(probabilities, self._sampling.top_p), _MASKED, scores
            )
        if self._sampling.min_p > 0:
            floor = self._sampling.min_p * probabilities.max(axis=-1, keepdims=True)
            scores = mx.where(probabilities < floor, _MASKED, scores)
        keys = mx.random.split(self._key)
        self._key = keys[0]
        return mx.random.categorical(scores, axis=-1, key=keys[1])


def _top_k_ids(scores: mx.array, k: int) -> mx.array:
    """Ids [rows, k] of the k highest scores, in no order."""
    return mx.argpartition(-scores, kth=k - 1, axis=-1)[:, :k]


def _nucleus_floor(probabilities: mx.array, top_p: float) -> mx.array:
    """Smallest probability [rows, 1] in the smallest set whose mass reaches `top_p`."""
    descending = -mx.sort(-probabilities, axis=-1)
    mass_before = mx.cumsum(descending, axis=-1) - descending
    last_kept = (mass_before < top_p).sum(axis=-1, keepdims=True) - 1
    return mx.take_along_axis(descending, last_kept, axis=-1)


def make_processors(sampling: Sampling, prompt_length: int) -> list[LogitsProcessor]:
    """Bias and penalties; none if nothing is asked for."""
    processors: list[LogitsProcessor] = []
    if sampling.logit_bias:
        processors.append(_bias(sampling))
    if sampling.repetition_penalty != 1 and sampling.repetition_context_size > 0:
        processors.append(_repetition_penalty(sampling))
    if sampling.presence_penalty or sampling.frequency_penalty:
        processors.append(_count_penalties(sampling, prompt_length))
    return processors


def _bias(sampling: Sampling) -> LogitsProcessor:
    ids = mx.array(list(sampling.logit_bias.keys()))
    values = mx.array(list(sampling.logit_bias.values()))

    def biased(_: mx.array, logits: mx.array) -> mx.array:
        return logits.at[:, ids].add(values.astype(logits.dtype))

    return biased


def _repetition_penalty(sampling: Sampling) -> LogitsProcessor:
    penalty, window = sampling.repetition_penalty, sampling.repetition_context_size

    def penalised(tokens: mx.array, logits: mx.array) -> mx.array:
        recent = tokens[-window:][None]
        picked = mx.take_along_axis(logits, recent, axis=-1)
        weakened = mx.where(picked < 0, picked * penalty, picked / penalty)
        return mx.put_along_axis(logits, recent, weakened, axis=-1)

    return penalised


def _count_penalties(sampling: Sampling, prompt_length: int) -> LogitsProcessor:
    def penalised(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.shape[0] <= prompt_length:
            return logits
        counts = mx.zeros(logits.shape[-1], dtype=logits.dtype).at[tokens[prompt_length:]].add(1)
        present = (counts > 0).astype(logits.dtype)
        return logits - sampling.frequency_penalty * counts - sampling.presence_penalty * present

    return penalised


def token_logprobs(logprobs: mx.array, token: int, alternatives: int) -> TokenLogprobs:
    """The chosen token and the `alternatives` most likely ones, from log-probabilities [vocabulary].

    Tokens that could not have been chosen are none: their score is no number in JSON.
    """
    scores = logprobs.astype(mx.float32)
    chosen = ScoredToken(token, cast("float", scores[token].item()))
    if alternatives == 0:
        return TokenLogprobs(chosen, ())
    ids = _top_k_ids(scores[None], min(alternatives, scores.shape[0]))[0]
    pairs = zip(_listed(ids), _listed(scores[ids]), strict=True)
    best = [ScoredToken(token, score) for token, score in pairs if score > _MASKED]
    return TokenLogprobs(chosen, tuple(sorted(best, key=lambda one: -one.logprob)))


def _listed(array: mx.array) -> list[Any]:
    return cast("list[Any]", array.tolist())
