"""Compare two sequences from their beginnings."""

from bisect import bisect_left
from collections.abc import Sequence


def common_length[T](left: Sequence[T], right: Sequence[T], step: int = 64) -> int:
    """Return the number of equal items at the beginning of two sequences of the same type.

    Compares `step` items at once, and bisects the first step that differs.
    """
    whole = min(len(left), len(right))
    parted = (at for at in range(0, whole, step) if left[at : at + step] != right[at : at + step])
    at = next(parted, whole)
    rest = range(1, min(step, whole - at) + 1)
    return at + bisect_left(rest, True, key=lambda count: left[at : at + count] != right[at : at + count])
