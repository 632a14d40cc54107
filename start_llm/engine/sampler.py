"""Sample the next tokens. Everything here runs on the engine thread.

This replaces mlx_lm's sampling. Its filters are compiled against the global random state, so one exception
inside them leaves that state unusable for the whole process (lesson 1), and its seeds are global to a thread.

Here each request has its own random numbers. Each is a function of the request's seed and of the position of
the token that it chooses, so it depends neither on the other sequences of the batch nor on how often a step
was tried: after a step that failed, or a preemption, the reply goes on as it would have. They come from the
host: a few floats cost less than keys that are split on the device. So what is compiled here are pure
functions of arrays (lesson 335).
"""

import hashlib
import math
import secrets
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any, NamedTuple

import mlx.core as mx

from start_llm.core.sampling import Sampling
from start_llm.core.thread_owners import ENGINE, owned_by

type LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
"""Maps all tokens so far [n] and logits [1, vocabulary] to logits [1, vocabulary]."""

type _Draw = Callable[[mx.array, _Columns], Drawn]
"""Draws tokens from logits [sequences, vocabulary] in float32 with the sequences' parameters."""

_MASKED = float("-inf")
_SEED_BITS = 64
_UNIFORM_BITS = 23
"""Bits of a random number. The largest such number below 1, times any float32, is less than that float32."""
_PROBABILITY_BITS = 30
"""Bits of a float32 from 0 to 1, as an integer. Such integers are ordered like the floats."""
_SMALL_VOCABULARY = 8192
"""Below this, looking at blocks first costs more than it saves."""
_OFF = 2.0
"""A top_p that disables the filter: every cumulative probability is below it."""


class Drawn(NamedTuple):
    """Drawn tokens.

    Attributes:
        ids: [sequences].
        chances: [sequences], the probability that each had after all filters; 1 for greedy decoding.
    """

    ids: mx.array
    chances: mx.array


@owned_by(ENGINE)
class Chooser:
    """One request's sampling parameters and random numbers."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        seed = secrets.randbits(_SEED_BITS) if sampling.seed is None else sampling.seed % 2**_SEED_BITS
        self._seed = seed.to_bytes(_SEED_BITS // 8, "little")

    def uniform(self, position: int) -> float:
        """Return the random number in [0, 1) for the token at a position of prompt and reply."""
        digest = hashlib.blake2b(position.to_bytes(8, "little"), digest_size=4, key=self._seed).digest()
        return (int.from_bytes(digest, "little") >> 32 - _UNIFORM_BITS) / 2**_UNIFORM_BITS

    def surprisal(self, chance: float) -> float:
        """Return the information content of a choice in bits.

        0 if the client gave the seed, because it then knows the random numbers.
        """
        return -math.log2(chance) if self.sampling.seed is None and chance > 0 else 0.0


@owned_by(ENGINE)
class BatchSampler:
    """Draws one token for each sequence, in a few operations for all of them.

    The order is temperature, top-k, top-p, min-p, which authors' generation_config.json assumes. A tone curve
    (HLG) takes the place of all four. A new sampler is made whenever sequences join or leave.

    Args:
        vocabulary: width of the logits.
    """

    def __init__(self, choosers: Sequence[Chooser], vocabulary: int) -> None:
        self._groups = _grouped(choosers, vocabulary)
        places = [place for group in self._groups for place in group.places]
        self._back = mx.array(sorted(range(len(places)), key=places.__getitem__))

    def __call__(self, logits: mx.array, positions: Sequence[int]) -> Drawn:
        """Draw one token for each sequence of logits [sequences, vocabulary].

        Args:
            positions: of the tokens, in their sequences.
        """
        if len(self._groups) == 1:
            return self._groups[0].draw(logits, positions)
        drawn = [group.draw(logits[mx.array(group.places)], positions) for group in self._groups]
        ids, chances = (mx.concatenate(list(column)) for column in zip(*drawn, strict=True))
        return Drawn(ids[self._back], chances[self._back])


class _Columns(NamedTuple):
    """The sequences' parameters, each as [sequences, 1].

    Attributes:
        candidates: the largest top_k, or more.
        uniform: random numbers.
    """

    temperature: mx.array
    top_k: mx.array
    top_p: mx.array
    min_p: mx.array
    width: mx.array
    shoulder: mx.array
    toe: mx.array
    pivot_offset: mx.array
    candidates: int
    uniform: mx.array


class _Group:
    """Sequences that are sampled by the same method."""

    def __init__(self, draw: _Draw, places: Sequence[int], choosers: Sequence[Chooser]) -> None:
        self.places = list(places)
        self._draw = draw
        self._choosers = list(choosers)
        wanted = [chooser.sampling for chooser in choosers]
        self._columns = _Columns(
            temperature=_column([sampling.temperature or 1.0 for sampling in wanted]),
            top_k=_column([sampling.top_k for sampling in wanted]),
            top_p=_column([sampling.top_p if 0 < sampling.top_p < 1 else _OFF for sampling in wanted]),
            min_p=_column([sampling.min_p for sampling in wanted]),
            width=_column([sampling.hlg_width for sampling in wanted]),
            shoulder=_column([sampling.hlg_shoulder for sampling in wanted]),
            toe=_column([sampling.hlg_toe for sampling in wanted]),
            pivot_offset=_column([sampling.hlg_pivot_offset for sampling in wanted]),
            candidates=max(sampling.top_k for sampling in wanted),
            uniform=_column([0.0]),
        )

    def draw(self, logits: mx.array, positions: Sequence[int]) -> Drawn:
        if self._draw is _max_likely:
            return _max_likely(logits, self._columns)
        own = [positions[place] for place in self.places]
        numbers = _column([chooser.uniform(at) for chooser, at in zip(self._choosers, own, strict=True)])
        return self._draw(logits.astype(mx.float32), self._columns._replace(uniform=numbers))


def _grouped(choosers: Sequence[Chooser], vocabulary: int) -> list[_Group]:
    """Group sequences by sampling method, which depends on each sequence alone."""
    places: dict[_Draw, list[int]] = {}
    for place, chooser in enumerate(choosers):
        places.setdefault(_way(chooser.sampling, vocabulary), []).append(place)
    return [_Group(draw, group, [choosers[place] for place in group]) for draw, group in places.items()]


def _way(sampling: Sampling, vocabulary: int) -> _Draw:
    if sampling.is_greedy:
        return _max_likely
    if sampling.hlg:
        return _of_the_curve
    if 0 < sampling.top_k < vocabulary:
        return _of_the_likeliest
    return _of_the_nucleus if 0 < sampling.top_p < 1 else _of_all


def _compiled(draw: _Draw) -> _Draw:
    """Trace a draw once for each shape of its arrays and each number of candidates; there are few of both."""
    # MLX does not see through named tuples.
    traced: Callable[..., Any] = mx.compile(lambda logits, *columns: draw(logits, _Columns(*columns)))

    @wraps(draw)
    def drawn(logits: mx.array, columns: _Columns) -> Drawn:
        few = columns._replace(candidates=_power_of_two(columns.candidates))
        return Drawn(*traced(logits, *few))

    return drawn


def _max_likely(logits: mx.array, _: _Columns) -> Drawn:
    return Drawn(mx.argmax(logits, axis=-1), mx.ones(logits.shape[0]))


@_compiled
def _of_the_likeliest(logits: mx.array, columns: _Columns) -> Drawn:
    """Sample with top-k: only `candidates` tokens are considered, the most likely first.

    Each filter keeps the first of them, so one cumulative sum serves top-p and the draw.
    """
    candidates = min(columns.candidates, logits.shape[-1])
    ids = top_k_ids(logits, candidates)
    scores = mx.take_along_axis(logits, ids, axis=-1)
    order = mx.argsort(-scores, axis=-1)
    scores = mx.take_along_axis(scores, order, axis=-1) / columns.temperature
    is_candidate = mx.arange(candidates)[None] < columns.top_k
    probabilities = mx.softmax(mx.where(is_candidate, scores, _MASKED), axis=-1)
    sums = mx.cumsum(probabilities, axis=-1)
    nucleus = mx.where(sums - probabilities < columns.top_p, probabilities, 1)
    floor = mx.maximum(nucleus.min(axis=-1, keepdims=True), columns.min_p * probabilities[:, :1])
    is_kept = (probabilities >= floor) & (probabilities > 0)
    total = mx.where(is_kept, sums, 0).max(axis=-1, keepdims=True)
    # The number is below 1: one that is kept passes, or one before it, which is as likely or more so.
    place = mx.argmax(sums > columns.uniform * total, axis=-1, keepdims=True)
    chances = mx.take_along_axis(probabilities, place, axis=-1) / total
    drawn = mx.take_along_axis(ids, mx.take_along_axis(order, place, axis=-1), axis=-1)
    return Drawn(drawn[:, 0], chances[:, 0])


@_compiled
def _of_the_nucleus(logits: mx.array, columns: _Columns) -> Drawn:
    """Sample with top-p and without top-k."""
    probabilities = mx.softmax(logits / columns.temperature, axis=-1)
    highest = _summary(mx.max, probabilities)
    floor = mx.maximum(_nucleus_floor(probabilities, columns.top_p), columns.min_p * highest)
    return _drawn(mx.where(probabilities >= floor, probabilities, 0), columns.uniform)


def _nucleus_floor(probabilities: mx.array, top_p: mx.array) -> mx.array:
    """Return the lowest probability of each nucleus [sequences, 1] without sorting.

    It is the highest floor above which there is enough mass, and is found bit by bit.
    """
    floor = mx.zeros(top_p.shape, dtype=mx.int32)
    for bit in reversed(range(_PROBABILITY_BITS)):
        higher = floor + (1 << bit)
        kept = probabilities * (probabilities >= higher.view(mx.float32))
        floor = mx.where(_summary(mx.sum, kept) >= top_p, higher, floor)
    return floor.view(mx.float32)


@_compiled
def _of_all(logits: mx.array, columns: _Columns) -> Drawn:
    """Sample with min-p or without any filter."""
    probabilities = mx.softmax(logits / columns.temperature, axis=-1)
    floor = columns.min_p * _summary(mx.max, probabilities)
    return _drawn(mx.where(probabilities >= floor, probabilities, 0), columns.uniform)


@_compiled
def _of_the_curve(logits: mx.array, columns: _Columns) -> Drawn:
    """Sample with the tone curve alone."""
    probabilities = mx.softmax(_tone_curve(logits, columns) / columns.temperature, axis=-1)
    return _drawn(probabilities, columns.uniform)


def _tone_curve(logits: mx.array, columns: _Columns) -> mx.array:
    """Return logits [sequences, vocabulary] with their contrast faded away from the pivot.

    The curve is linear within `width` of the pivot, and logarithmic beyond: with a distance d from there, it
    gains b ln(1 + d/b) in place of d, where b is the shoulder above and the toe below. It is monotone with a
    continuous slope. A masked token (-inf) stays masked.
    """
    pivot = logits.max(axis=-1, keepdims=True) - columns.pivot_offset
    distance = logits - pivot
    above = pivot + columns.width + _faded(distance - columns.width, columns.shoulder)
    below = pivot - columns.width - _faded(-distance - columns.width, columns.toe)
    # Unshifted, so that an infinite width is the same as no curve, to the bit.
    linear_or_above = mx.where(distance > columns.width, above, logits)
    return mx.where(distance < -columns.width, below, linear_or_above)


def _faded(distance: mx.array, scale: mx.array) -> mx.array:
    return scale * mx.log1p(distance / scale)


def _summary(reduced: Callable[..., mx.array], numbers: mx.array) -> mx.array:
    """Return the sum or maximum of each row of numbers [sequences, count] as [sequences, 1].

    MLX reduces columns several times as fast as rows on a CPU.
    """
    height = _height(numbers.shape[-1], 1)
    columns = reduced(numbers.reshape(numbers.shape[0], height, -1), axis=1)
    return reduced(columns, axis=-1, keepdims=True)


def _drawn(weights: mx.array, uniform: mx.array) -> Drawn:
    """Draw one index for each sequence of weights [sequences, candidates], each with its weight's chance.

    It is the first index at which the cumulative sum exceeds `uniform` times the total.
    """
    sums = mx.cumsum(weights, axis=-1)
    # A GPU adds the parts in varying order: the sum may pass at an index of weight 0, or nowhere.
    passed = (sums > uniform * sums[:, -1:]) & (weights > 0)
    place = mx.argmax(passed, axis=-1, keepdims=True)
    has_passed = mx.take_along_axis(passed, place, axis=-1)
    place = mx.where(has_passed, place, mx.argmax(weights, axis=-1, keepdims=True))
    chances = mx.take_along_axis(weights, place, axis=-1) / sums[:, -1:]
    return Drawn(place[:, 0], chances[:, 0])


def _column(numbers: Sequence[float]) -> mx.array:
    return mx.array(list(numbers))[:, None]


def _power_of_two(number: int) -> int:
    """Return the lowest power of two that is not below a number; at least 1."""
    return 1 << max(number - 1, 0).bit_length()


def top_k_ids(scores: mx.array, k: int) -> mx.array:
    """Return the ids [sequences, k] of the k highest scores, unordered.

    They stand in the k blocks with the highest maxima. A block is a column of the vocabulary, written in
    `height` rows.
    """
    sequences, vocabulary = scores.shape
    height = _height(vocabulary, k)
    if height == 1:
        return _partitioned(scores, k)
    width = vocabulary // height
    rows = scores.reshape(sequences, height, width)
    blocks = _partitioned(rows.max(axis=1), k)
    candidates = mx.take_along_axis(rows, blocks[:, None], axis=2).reshape(sequences, height * k)
    places = _partitioned(candidates, k)
    return mx.take_along_axis(blocks, places % k, axis=-1) + places // k * width


@cache
def _height(vocabulary: int, k: int) -> int:
    """Return the tokens of a block, so that there are about as many blocks as candidates in k of them."""
    if vocabulary < _SMALL_VOCABULARY:
        return 1
    return next(rows for rows in range(math.isqrt(vocabulary // k), 0, -1) if vocabulary % rows == 0)


def _partitioned(scores: mx.array, k: int) -> mx.array:
    return mx.argpartition(-scores, kth=k - 1, axis=-1)[:, :k]


def make_processors(sampling: Sampling, prompt_length: int) -> list[LogitsProcessor]:
    """Make the processors for logit bias and penalties; none if the request uses none."""
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
