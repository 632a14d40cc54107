"""Check at start-up that batched sequences get the same logits as each gets alone.

A cache class that can be merged does not prove it: gemma2 adds a mask per sequence to scores per head, which
gives wrong numbers if there are as many sequences as heads, and an exception otherwise.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from start_llm.cache.leaves import leaves
from start_llm.engine import merging
from start_llm.engine.pace import Pace
from start_llm.engine.shifted_cache import shifted

_LENGTHS = (9, 4, 14, 6, 11, 3, 8, 5)
"""Tokens of the prompts. All differ, so that every sequence but the longest is padded."""
_PROMPTS = 3
"""Most of them that are prefilled together."""
_VOCABULARY = 64
_ROUNDING = 4.0
"""Allowed difference, as a multiple of the difference between equal sequences without padding."""
_LEAST, _MOST = 0.1, 0.5
"""Bounds of the allowed difference, in standard deviations of the logits: bfloat16 rounds to 1/256."""

_SHIFT = 3
"""Positions by which each sequence is moved more than the one before it, if positions may be shifted."""

_PATIENCE_S = 20.0
"""Predicted seconds up to which the check is made."""

_WRONG_IN_LONG_BATCHES = {
    "minimax_m3_vl": "its sparse attention counts the blocks that it drops from the padding on"
}
"""Model types of mlx_lm 0.32.2 that only short batches compute right; see `benchmarks truth --only types`."""

type Caches = list[Any]


@dataclass(frozen=True, slots=True)
class BatchVerdict:
    """The result of the check.

    Attributes:
        batches: whether sequences may share a forward pass.
        reason: why not, in words for the person who runs the server; empty if they may.
        prefills: whether prompts of different lengths may, too. If not, they are prefilled one by one.
    """

    batches: bool
    reason: str = ""
    prefills: bool = False


def check_batching(
    network: Any,
    fresh: Callable[[], Caches],
    max_sequences: int,
    *,
    shifts: bool = False,
    pace: Pace | None = None,
) -> BatchVerdict:
    """Merge two sequences, a third, and the others at once; remove the first; and compare the logits of each
    with its own alone.

    Where that would take long, it is left out, and sequences do not share a forward pass.

    Args:
        fresh: makes empty caches.
        max_sequences: sequences that decode at once. At most eight are tried; more are assumed to behave
            alike.
        shifts: positions of sequences may be shifted, as after images.
        pace: of the network.
    """
    count = min(max_sequences, len(_LENGTHS))
    if reason := _reason_not_to_try(network, fresh, count, pace):
        return BatchVerdict(batches=False, reason=reason)
    sequences = [
        _TrialSequence(network, fresh(), place, shift=_SHIFT * place if shifts else 0)
        for place in range(count)
    ]
    try:
        worst = _worst_difference(network, sequences)
    except Exception as error:  # noqa: BLE001 - whatever a network raises for several sequences, it runs one
        return BatchVerdict(
            batches=False, reason=f"several sequences at once raise {type(error).__name__}: {error}"
        )
    if worst is not None:
        return BatchVerdict(
            batches=False, reason=f"with {worst} sequences at once it computes other logits than alone"
        )
    return BatchVerdict(batches=True, prefills=_prefills_together(network, fresh, min(count, _PROMPTS)))


def _prefills_together(network: Any, fresh: Callable[[], Caches], count: int) -> bool:
    """Return whether prompts that are computed in shared passes are followed by the same logits as alone.

    Each is computed in two chunks, as up to a checkpoint and after it.
    """
    sequences = [_TrialSequence(network, fresh(), place) for place in range(count)]
    caches, rounding = [fresh() for _ in sequences], _rounding(network, sequences[0], count)
    try:
        for chunks in _in_two([sequence.prompt for sequence in sequences]):
            caches = merging.feed(network, caches, chunks)
    except Exception:  # noqa: BLE001 - whatever a network raises for several prompts, it computes one
        return False
    return all(
        _is_right(network, [sequence], own, _allowed(rounding))
        for sequence, own in zip(sequences, caches, strict=True)
    )


def _reason_not_to_try(network: Any, fresh: Callable[[], Caches], count: int, pace: Pace | None) -> str:
    """Return why sequences may not share a forward pass, as far as that is known without a trial."""
    if count < 2:
        return "one reply at a time is all that BATCH allows"
    if reason := _WRONG_IN_LONG_BATCHES.get(getattr(network, "model_type", "")):
        return reason
    if not merging.can_merge(fresh()):
        return "its caches cannot be merged"
    seconds = pace.seconds(*_passes(count)) if pace else 0.0
    if seconds > _PATIENCE_S:
        return f"trying several at once would take about {seconds:,.0f} s on this machine"
    return ""


def _passes(count: int) -> Iterator[int]:
    """Yield the tokens of each forward pass of the check for so many sequences."""
    yield from _LENGTHS[:count]
    for together in (2, count):  # see `_rounding`
        yield from (together, 1)
    for together in (*sorted({2, min(3, count), count}), 1, count - 1):  # see `_is_right`
        yield from (together, *(1,) * together)
    prompts = [range(length) for length in _LENGTHS[: min(count, _PROMPTS)]]  # see `_prefills_together`
    yield from (*map(len, prompts), len(prompts), 1)
    yield from (len(prompts) * max(map(len, chunks)) for chunks in _in_two(prompts))
    yield from (1,) * 2 * len(prompts)


class _TrialSequence:
    """A prefilled prompt, and the logits of the tokens after it when the sequence runs alone."""

    def __init__(self, network: Any, caches: Caches, place: int, shift: int = 0) -> None:
        self._network = network
        self._place = place
        self.shift = shift
        self.prompt = [self._token(-index) for index in range(_LENGTHS[place], 0, -1)]
        network(mx.array([self.prompt]), cache=caches)
        mx.eval([leaf.state for leaf in leaves(caches)])
        self.start = copy.deepcopy(caches)
        self._alone = caches
        self.steps = 0

    def _token(self, step: int) -> int:
        return (17 * self._place + 7 * step + 5) % _VOCABULARY + 1

    @property
    def next_token(self) -> int:
        return self._token(self.steps)

    def step(self) -> mx.array:
        """Return the logits [vocabulary] after the next token, computed alone."""
        logits = _logits(self._network, [self.next_token], shifted(self._alone, self.shift))[0]
        self.steps += 1
        return logits


def _worst_difference(network: Any, sequences: Sequence[_TrialSequence]) -> int | None:
    """Return the size of the first batch whose logits are wrong; None if none is.

    Batches of two, three and all sequences are checked, then the first sequence and the others after it has
    left.
    """
    rounding = max(_rounding(network, sequences[0], count) for count in (2, len(sequences)))
    allowed = _allowed(rounding)
    shifts = [sequence.shift for sequence in sequences]
    caches = merging.merge([sequences[0].start, sequences[1].start], shifts[:2])
    counts = sorted({2, min(3, len(sequences)), len(sequences)})
    for before, count in zip([2, *counts], counts, strict=False):
        if count > before:
            newcomers = [sequence.start for sequence in sequences[before:count]]
            merging.extend(caches, newcomers, shifts[before:count])
        if not _is_right(network, sequences[:count], caches, allowed):
            return count
    (leaving,) = merging.take_out(caches, [0], len(sequences))
    if not _is_right(network, sequences[:1], leaving, allowed):
        return len(sequences)
    if len(sequences) == 2:
        (caches,) = merging.take_out(caches, [0], 1)
        caches = shifted(caches, sequences[1].shift)
    return None if _is_right(network, sequences[1:], caches, allowed) else len(sequences) - 1


def _in_two(prompts: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Return the first one or two tokens of each prompt, and the rest of each."""
    ends = [1 + place % 2 for place in range(len(prompts))]
    first = [prompt[:end] for prompt, end in zip(prompts, ends, strict=True)]
    return [first, [prompt[end:] for prompt, end in zip(prompts, ends, strict=True)]]


def _allowed(rounding: float) -> float:
    return min(max(_ROUNDING * rounding, _LEAST), _MOST)


def _rounding(network: Any, sequence: _TrialSequence, count: int) -> float:
    """Return the difference that other kernels cause, measured on `count` equal sequences."""
    caches = merging.merge([copy.deepcopy(sequence.start) for _ in range(count)])
    together = _logits(network, [sequence.next_token] * count, caches)
    alone = _logits(network, [sequence.next_token], copy.deepcopy(sequence.start))
    return max(_difference(together[place], alone[0]) for place in range(count))


def _is_right(network: Any, sequences: Sequence[_TrialSequence], caches: Caches, allowed: float) -> bool:
    together = _logits(network, [sequence.next_token for sequence in sequences], caches)
    return all(
        _difference(together[place], sequence.step()) <= allowed for place, sequence in enumerate(sequences)
    )


def _logits(network: Any, tokens: Sequence[int], caches: Caches) -> mx.array:
    """Return logits [sequences, vocabulary] in float32."""
    return network(mx.array(list(tokens))[:, None], cache=caches)[:, -1, :].astype(mx.float32)


def _difference(left: mx.array, right: mx.array) -> float:
    """Return the largest difference relative to the standard deviation; infinite if any value is NaN."""
    difference = mx.abs(left - right).max() / mx.maximum(mx.std(right), 1e-6)
    return cast("float", mx.where(mx.isnan(difference), float("inf"), difference).item())
