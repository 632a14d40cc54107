"""Ask the model's network itself, without the server's cache: what is right, and how fast it is.

Everything here runs on the engine thread, which owns the arrays.
"""

import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx_lm.generate import generate_step

from start_llm.cache.layers import Layers

_PIECES = (512, 128, 61)
"""Numbers of tokens that are computed at once."""
_OTHER_PIECES = (61, 17, 128, 7, 31, 256)
_TAIL = 12
"""Last tokens of a sequence whose predictions are compared."""
_LIKELIEST = 5
_ROUNDINGS = 4.0
AGAINST_THE_END = -100.0
"""Added to the logits of tokens that end a reply, here as in the requests of the examination."""
_MOST_TYPICAL = {"float32": 0.01}
_MOST_TYPICAL_OF_HALVES = 0.5
"""In standard deviations of the logits. bfloat16, with 8 bits, has about a tenth of it."""
_LEAST_TOLERANCE, _MOST_TOLERANCE = 1e-3, 1.0
"""Bounds of the tolerance, in nats."""

type Tokens = Sequence[int]


def forget_peak_memory() -> None:
    """Let `peak_memory` begin anew."""
    mx.reset_peak_memory()


def peak_memory() -> int:
    """Return the most bytes that arrays took at any time."""
    return mx.get_peak_memory()


@dataclass(frozen=True, slots=True)
class Rounding:
    """The difference between ways to compute the same tokens, which differ in rounding alone.

    Attributes:
        typical: median over positions of the largest difference between logits, in standard deviations.
        nats: largest difference between log-probabilities of likely tokens.
        precision: type of the logits.
    """

    typical: float
    nats: float
    precision: str

    @property
    def is_rounding(self) -> bool:
        """False if it is more than this type of number explains."""
        return self.typical <= _MOST_TYPICAL.get(self.precision, _MOST_TYPICAL_OF_HALVES)

    @property
    def tolerance(self) -> float:
        """Nats by which two right answers may differ."""
        return min(max(_ROUNDINGS * self.nats, _LEAST_TOLERANCE), _MOST_TOLERANCE)


@dataclass(frozen=True, slots=True)
class ServedReply:
    """A reply of the server, to be compared with the network's own predictions.

    Attributes:
        logprobs: of each token, the log-probabilities of itself and of the likeliest ones, by token.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]


@dataclass(frozen=True, slots=True)
class Disagreement:
    """The place of a reply where the server and the network disagree most.

    Attributes:
        nats: distance of the log-probabilities.
        is_rounding: the network disagrees with itself as much, when it computes the tokens in other pieces.
    """

    place: int
    nats: float
    is_rounding: bool


@dataclass(frozen=True, slots=True)
class Sense:
    """Mean information content, in nats for each token.

    Attributes:
        first: of a passage.
        second: of the same passage, read a second time right behind the first.
        chance: of a token, if all were equally likely.
    """

    first: float
    second: float
    chance: float


class Network:
    """The network of the loaded model.

    Args:
        eos: the tokens that end a reply.
    """

    def __init__(self, network: Any, eos: Collection[int]) -> None:
        self._network = network
        self._layers = Layers(network)
        self._eos = mx.array(sorted(eos), dtype=mx.int32)
        self._precision = "nothing computed"

    def rounding(self, sequences: Sequence[Tokens]) -> Rounding:
        """Compute the same tokens at once, in pieces and one by one, and compare the predictions."""
        typical, nats = list[float](), [0.0]
        for ids in sequences:
            first, *others = (self._tail(ids, piece) for piece in _PIECES)
            for other in (*others, self._tail(ids, _PIECES[0], one_by_one=True)):
                spread = mx.maximum(mx.std(first, axis=-1), 1e-6)
                typical += _floats(mx.abs(first - other).max(axis=-1) / spread)
                nats += _floats(_distances_of_likeliest(first, other))
        return Rounding(_median(typical), max(nats), self._precision)

    def difference(self, reply: ServedReply, tolerance: float) -> Disagreement | None:
        """Return where a reply is not what the network predicts; None if all of it is.

        Args:
            tolerance: nats.
        """
        ids = (*reply.prompt, *reply.tokens)
        distances = self._distances(reply, ids, _PIECES[0])
        wrong = [place for place, distance in enumerate(distances) if not distance <= tolerance]
        if not wrong:
            return None
        for piece in _OTHER_PIECES:
            others = self._distances(reply, ids, piece)
            wrong = [place for place in wrong if not others[place] <= tolerance]
            if not wrong:
                break
        place = max(wrong or range(len(distances)), key=lambda place: _order(distances[place]))
        return Disagreement(place, distances[place], is_rounding=not wrong)

    def sense(self, passage: Tokens) -> Sense:
        """Read a passage twice."""
        ids = (*passage, *passage)
        logprobs = _logprobs(self._predictions(ids, len(ids) - 1, len(ids)))
        read = mx.take_along_axis(logprobs, mx.array(ids[1:])[:, None], axis=-1)[:, 0]
        half = len(passage) - 1
        first, second = _floats(mx.stack([read[:half].mean(), read[half + 1 :].mean()]))
        return Sense(-first, -second, math.log(logprobs.shape[-1]))

    def decode_speed(self, prompt: Tokens, tokens: int) -> float:
        """Return mlx_lm's tokens per second, for one greedy reply of this length."""
        ids = mx.array(list(prompt))
        steps = generate_step(ids, self._network, max_tokens=tokens + 1, prompt_cache=self._layers.fresh())
        next(steps)
        began = time.perf_counter()
        count = sum(1 for _ in steps)
        return count / (time.perf_counter() - began)

    def _tail(self, ids: Tokens, piece: int, *, one_by_one: bool = False) -> mx.array:
        """Return logits [tokens, vocabulary] of the last predictions."""
        return self._predictions(ids, _TAIL, piece, one_by_one=one_by_one)

    def _distances(self, reply: ServedReply, ids: Tokens, piece: int) -> list[float]:
        """Return for each token of a reply how far the server's log-probabilities are from the network's."""
        ours = _logprobs(self._predictions(ids, len(reply.tokens), piece))
        return [
            max(
                abs(other - logprob)
                for other, logprob in zip(
                    _floats(row[mx.array(list(logprobs))]), logprobs.values(), strict=True
                )
            )
            for row, logprobs in zip(ours, reply.logprobs, strict=True)
        ]

    def _predictions(self, ids: Tokens, count: int, piece: int, *, one_by_one: bool = False) -> mx.array:
        """Return float32 logits [count, vocabulary]: the predictions of the last tokens of `ids`.

        Args:
            piece: tokens of what comes before that are computed at once.
            one_by_one: compute the last tokens one by one, as in a reply; otherwise at once.
        """
        caches, start = self._layers.fresh(), len(ids) - 1 - count
        for begin in range(0, start, piece):
            self._network(mx.array([ids[begin : min(begin + piece, start)]]), cache=caches)
            mx.eval([cache.state for cache in caches])
        last = ids[start:-1]
        fed = [[token] for token in last] if one_by_one else [last]
        logits = [self._network(mx.array([part]), cache=caches)[0] for part in fed]
        self._precision = str(logits[0].dtype).removeprefix("mlx.core.")
        predictions = mx.concatenate(logits).astype(mx.float32)
        return predictions.at[:, self._eos].add(AGAINST_THE_END)


def _logprobs(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _distances_of_likeliest(first: mx.array, other: mx.array) -> mx.array:
    """Return the largest distance [positions] of the likeliest tokens' log-probabilities."""
    likeliest = mx.argpartition(-first, kth=_LIKELIEST, axis=-1)[:, :_LIKELIEST]
    ours, theirs = (mx.take_along_axis(_logprobs(logits), likeliest, axis=-1) for logits in (first, other))
    return mx.abs(ours - theirs).max(axis=-1)


def _floats(values: mx.array) -> Iterator[float]:
    return iter(cast("list[float]", values.tolist()))


def _order(distance: float) -> float:
    """Put NaN behind everything else."""
    return math.inf if math.isnan(distance) else distance


def _median(values: Sequence[float]) -> float:
    return sorted(values, key=_order)[len(values) // 2]
