"""Take copies of states back to earlier positions, as far as they are windows.

A copy of a window can go back over the tokens that it keeps before the window: its *reach*.

Runs on the engine thread.
"""

from collections.abc import Sequence
from typing import Any

from start_llm.cache.arrays import Arrays, LeafState, joined
from start_llm.cache.kinds import NonTrimmableLeaf
from start_llm.cache.pages import EarlierState


def shortest_window(leaves: Sequence[tuple[Any, NonTrimmableLeaf]]) -> int:
    """Return the tokens of the shortest window; 0 if a leaf has none, or if there are no leaves."""
    windows = [kind.rewinding.window(leaf) if kind.rewinding else 0 for leaf, kind in leaves]
    return min(windows, default=0)


def longer_arrays(
    leaf: Any, kind: NonTrimmableLeaf, reach: int, index: int, earlier: EarlierState | None
) -> Arrays:
    """Return a leaf's arrays with `reach` tokens more than it needs, or as many as there are.

    Args:
        index: place of the leaf among the non-trimmable ones.
        earlier: a state of the same tokens, for what the leaf no longer has of that.
    """
    if kind.rewinding is None:
        return kind.arrays(leaf)
    arrays = kind.rewinding.longer(leaf, reach)
    length = arrays[0].shape[-2]
    missing = min(leaf.offset, kind.rewinding.window(leaf) + reach) - length
    if earlier is None or missing <= 0 or length < earlier.tokens_before:
        return arrays
    before, _ = earlier.state.leaves[index]
    end = before[0].shape[-2] - (length - earlier.tokens_before)
    start = max(end - missing, 0)
    pieces = zip(before, arrays, strict=True)
    return tuple(joined([old[..., start:end, :], new], 0) for old, new in pieces) if start < end else arrays


def rewound_states(
    leaves: Sequence[tuple[Any, NonTrimmableLeaf]],
    states: Sequence[LeafState],
    tokens: int,
    more: int = 0,
) -> tuple[LeafState, ...]:
    """Return views of the states of leaves that are windows, as they were `tokens` tokens before.

    Args:
        more: tokens before the window that stay.
    """
    if not tokens:
        return tuple(states)
    return tuple(
        kind.rewinding.rewound(leaf, arrays, numbers, tokens, more)
        for (leaf, kind), (arrays, numbers) in zip(leaves, states, strict=True)
        if kind.rewinding
    )


def reach_of(leaf: Any, kind: NonTrimmableLeaf, arrays: Arrays, ahead: int) -> int:
    """Return how far a copy of a leaf can go back: over what is kept before its window, or to its start.

    Args:
        arrays: the copy.
        ahead: tokens by which the leaf is further than the copy.
    """
    if kind.rewinding is None:
        return 0
    length, position = arrays[0].shape[-2], leaf.offset - ahead
    return int(position if length == position else max(length - kind.rewinding.window(leaf), 0))
