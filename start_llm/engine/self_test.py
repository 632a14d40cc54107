"""Whether rows that share a forward pass say what each says alone, found out before any request comes.

That a cache class can be merged proves nothing: gemma2 adds a mask for rows to scores for heads, which
gives wrong numbers where there are as many of one as of the other, and an exception elsewhere.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from start_llm.cache.layers import leaves
from start_llm.engine import merging

_LENGTHS = (9, 4, 14, 6, 11, 3, 8, 5)
"""Tokens of the prompts: all different, so that every row but the longest is padded."""
_VOCABULARY = 64
_ROUNDING = 4.0
"""A difference may be so many times that of several equal rows, where nothing is padded."""
_LEAST, _MOST = 0.1, 0.5
"""But no less and no more than this, in parts of the spread of the logits: bfloat16 rounds to 1/256."""

_WRONG_IN_LONG_BATCHES = {
    "minimax_m3_vl": "its sparse attention counts the blocks that it drops from the padding on"
}
"""Types of mlx_lm 0.32.2 that are right in short batches alone. `benchmarks/families.py` finds such."""

type Caches = list[Any]


@dataclass(frozen=True, slots=True)
class BatchVerdict:
    """What came out.

    Attributes:
        batches: rows may share a pass.
        reason: why not, in words for the person who runs the server; empty if they may.
    """

    batches: bool
    reason: str = ""


def check_batching(network: Any, fresh: Callable[[], Caches], most_rows: int) -> BatchVerdict:
    """Let two rows and more join each other one by one, and the first one leave again.

    Args:
        fresh: makes empty caches.
        most_rows: rows that decode at once. More than eight are taken to do what eight do.
    """
    if most_rows < 2:
        return BatchVerdict(batches=False, reason="one reply at a time is all that BATCH allows")
    if reason := _WRONG_IN_LONG_BATCHES.get(getattr(network, "model_type", "")):
        return BatchVerdict(batches=False, reason=reason)
    if not merging.can_merge(fresh()):
        return BatchVerdict(batches=False, reason="its caches cannot be merged")
    rows = [_Row(network, fresh(), place) for place in range(min(most_rows, len(_LENGTHS)))]
    try:
        worst = _worst_difference(network, rows)
    except Exception as error:  # noqa: BLE001 - whatever a network raises for several rows, it runs one
        return BatchVerdict(
            batches=False, reason=f"several rows at once raise {type(error).__name__}: {error}"
        )
    if worst is not None:
        return BatchVerdict(
            batches=False, reason=f"with {worst} rows at once it computes other logits than alone"
        )
    return BatchVerdict(batches=True)


class _Row:
    """A prompt that is computed, and what the network says of each token behind it when the row is alone."""

    def __init__(self, network: Any, caches: Caches, place: int) -> None:
        self._network = network
        self._place = place
        network(mx.array([[self._token(-index) for index in range(_LENGTHS[place], 0, -1)]]), cache=caches)
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
        """Logits [vocabulary] of the next token, computed alone."""
        logits = _logits(self._network, [self.next_token], self._alone)[0]
        self.steps += 1
        return logits


def _worst_difference(network: Any, rows: Sequence[_Row]) -> int | None:
    """Of two, three and all rows, how many shared the first pass that was wrong; None if none was."""
    rounding = max(_rounding(network, rows[0], count) for count in (2, len(rows)))
    allowed = min(max(_ROUNDING * rounding, _LEAST), _MOST)
    caches = merging.merge([rows[0].start, rows[1].start])
    for count in range(2, len(rows) + 1):
        if count > 2:
            merging.extend(caches, rows[count - 1].start)
        if count in (2, 3, len(rows)) and not _is_right(network, rows[:count], caches, allowed):
            return count
    leaving = merging.take_out(caches, 0, len(rows))
    if not _is_right(network, rows[:1], leaving, allowed):
        return len(rows)
    if len(rows) == 2:
        merging.unmerge(caches)
    return None if _is_right(network, rows[1:], caches, allowed) else len(rows) - 1


def _rounding(network: Any, row: _Row, count: int) -> float:
    """The difference that other kernels make, for so many rows that are equal."""
    caches = merging.merge([copy.deepcopy(row.start) for _ in range(count)])
    together = _logits(network, [row.next_token] * count, caches)
    alone = _logits(network, [row.next_token], copy.deepcopy(row.start))
    return max(_difference(together[place], alone[0]) for place in range(count))


def _is_right(network: Any, rows: Sequence[_Row], caches: Caches, allowed: float) -> bool:
    together = _logits(network, [row.next_token for row in rows], caches)
    return all(_difference(together[place], row.step()) <= allowed for place, row in enumerate(rows))


def _logits(network: Any, tokens: Sequence[int], caches: Caches) -> mx.array:
    """[rows, vocabulary] in float32."""
    return network(mx.array(list(tokens))[:, None], cache=caches)[:, -1, :].astype(mx.float32)


def _difference(left: mx.array, right: mx.array) -> float:
    """The largest difference, in parts of the spread of the logits; infinite if any is no number."""
    difference = mx.abs(left - right).max() / mx.maximum(mx.std(right), 1e-6)
    return cast("float", mx.where(mx.isnan(difference), float("inf"), difference).item())
