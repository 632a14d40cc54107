"""Take caches back to where they were before a forward pass, without a copy of their KV."""

from collections.abc import Sequence
from copy import copy
from typing import Any

from start_llm.cache.kinds import TrimmableLeaf, kind_of, reuse_of
from start_llm.cache.leaves import leaves


class RollbackPoint:
    """What the caches of one sequence held at a moment.

    It costs references alone. Networks put new arrays in the place of old ones, so a kept one stays as it
    was. Only a window is written in place, by a pass of one token. What is kept is an array object of its own
    for the same memory, which MLX therefore copies before it writes there.

    Args:
        caches: of known classes; see `can_roll_back`.

    Attributes:
        can_keep: `keep` can leave some of the tokens.
    """

    def __init__(self, caches: Sequence[Any]) -> None:
        self._marks = [
            (leaf, {name: copy(getattr(leaf, name)) for name in kind_of(leaf).changed})
            for leaf in leaves(caches)
        ]
        self.can_keep = all(isinstance(reuse_of(leaf), TrimmableLeaf) for leaf, _ in self._marks)

    def keep(self, tokens: int) -> None:
        """Take all leaves back to `tokens` tokens after this point, which they still hold.

        Raises:
            ValueError: a leaf can only be taken back to the point itself.
        """
        if tokens and not self.can_keep:
            raise ValueError("these caches cannot keep a part of their tokens")
        for leaf, mark in self._marks:
            for name, value in mark.items():
                setattr(leaf, name, copy(value))
            if tokens:
                leaf.offset += tokens


def can_roll_back(caches: Sequence[Any]) -> bool:
    """Return whether all leaves are of classes that `cache.kinds` knows."""
    return all(reuse_of(leaf) is not None for leaf in leaves(caches))
