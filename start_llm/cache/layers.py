"""The caches of one network: cut into pages, copied, put together again.

A network has one cache for each layer, some of which hold several. What can be done with the *leaves* depends
on their class: `cache/kinds` has the table.

Runs on the engine thread. What is given out to be kept is contiguous and evaluated: no lazy slice keeps a
large buffer alive, and no array changes under its holder.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from start_llm.cache.kinds import Arrays, Sliced, Whole, put_state, reuse_of

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""glibc keeps what is freed between things that stay; MLX allocates with it on Linux (lesson 14)."""

_SMALL_BYTES = 2**20
"""Beside more than this, the 16 KiB that `mx.contiguous` may leave are nothing."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Some consecutive tokens of all sliced leaves."""

    leaves: tuple[Arrays, ...]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for leaf in self.leaves for array in leaf)

    @property
    def arrays(self) -> int:
        return sum(len(leaf) for leaf in self.leaves)

    def part(self, start: int, end: int) -> Cut:
        """Tokens `start` to `end` of these; not copied."""
        return Cut(tuple(tuple(array[..., start:end, :] for array in leaf) for leaf in self.leaves))


@dataclass(frozen=True, slots=True)
class State:
    """All whole leaves at one position."""

    leaves: tuple[tuple[Arrays, tuple[int, ...]], ...]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for arrays, _ in self.leaves for array in arrays)

    @property
    def arrays(self) -> int:
        return sum(len(arrays) for arrays, _ in self.leaves)


class Layers:
    """The leaves of one network's caches.

    Args:
        room: tokens that fresh caches can take before they grow, and by which they grow then.

    Attributes:
        unknown: classes that no row describes; a network that has one is served without reuse.
        has_state: some leaves are whole, so a prompt can only be taken up where their state was kept.
        is_sliced: some leaves keep something for every token.
    """

    def __init__(self, network: Any, room: int = 256) -> None:
        self._network = network
        self._room = room
        known = [(leaf, reuse_of(leaf)) for leaf in leaves(self.fresh())]
        self.unknown = sorted({_told(leaf) for leaf, reuse in known if reuse is None})
        self.has_state = any(isinstance(reuse, Whole) for _, reuse in known)
        self.is_sliced = any(isinstance(reuse, Sliced) for _, reuse in known)

    def fresh(self) -> list[Any]:
        """Empty caches, one for each entry that the network expects."""
        # Not at the top: `start_llm.models` has to be the first to import mlx_lm (lesson 2).
        from mlx_lm.models.cache import make_prompt_cache  # noqa: PLC0415

        caches = make_prompt_cache(self._network)
        for leaf, _ in _sliced(caches):
            leaf.step = self._room
        return caches

    def settle(self, caches: Sequence[Any]) -> None:
        """Caches that are kept: see `settle`."""
        settle(caches)

    def view(self, caches: Sequence[Any], start: int, end: int) -> Cut:
        """Tokens `start` to `end` of all sliced leaves; not copied."""
        whole = Cut(tuple(kind.arrays(leaf) for leaf, kind in _sliced(caches)))
        return whole.part(start, end)

    def cut(self, caches: Sequence[Any], start: int, end: int) -> Cut:
        """Copies of tokens `start` to `end` of all sliced leaves."""
        cut = Cut(
            tuple(
                tuple(_own(array[..., start:end, :]) for array in kind.arrays(leaf))
                for leaf, kind in _sliced(caches)
            )
        )
        mx.eval([array for leaf in cut.leaves for array in leaf])
        return cut

    def take_apart(self, caches: Sequence[Any], spans: Sequence[tuple[int, int]]) -> list[Cut]:
        """Copies of these spans of tokens. Leaf by leaf, the caches are emptied: little is there twice."""
        columns = [_emptied(leaf, kind, spans) for leaf, kind in _sliced(caches)]
        return [Cut(tuple(column[index] for column in columns)) for index in range(len(spans))]

    def state(self, caches: Sequence[Any]) -> State:
        """Copies of all whole leaves as they are now."""
        state = State(
            tuple(
                (tuple(_own(array) for array in kind.arrays(leaf)), kind.numbers(leaf))
                for leaf, kind in _whole(caches)
            )
        )
        mx.eval([array for arrays, _ in state.leaves for array in arrays])
        return state

    def assemble(self, cuts: Sequence[Cut], state: State | None, length: int) -> list[Any]:
        """Caches that hold `length` tokens: the cuts one behind the other, and the state at their end."""
        caches = self.fresh()
        for index, (leaf, kind) in enumerate(_sliced(caches)):
            columns = zip(*(cut.leaves[index] for cut in cuts), strict=True)
            kind.fill(leaf, tuple(_one_behind_the_other(parts) for parts in columns))
            leaf.offset = length
        if state is not None:
            self.set_state(caches, state)
        mx.eval([leaf.state for leaf in leaves(caches)])
        return caches

    def set_state(self, caches: Sequence[Any], state: State) -> None:
        """Put whole leaves back to a state. They get arrays of their own: some write into theirs."""
        for (leaf, kind), (arrays, numbers) in zip(_whole(caches), state.leaves, strict=True):
            kind.fill(leaf, tuple(mx.array(array) for array in arrays), numbers)

    def trim(self, caches: Sequence[Any], length: int) -> None:
        """Forget what sliced leaves hold beyond `length` tokens."""
        for leaf, _ in _sliced(caches):
            leaf.offset = length

    def length(self, caches: Sequence[Any]) -> int | None:
        """Tokens that the sliced leaves hold; None if there are none to ask.

        A leaf that nothing was ever put into belongs to a layer that does not attend.
        """
        sliced = [leaf for leaf, _ in _sliced(caches)]
        offsets = {int(leaf.offset) for leaf in sliced if not leaf.empty()} or {0 for _ in sliced}
        return offsets.pop() if len(offsets) == 1 else None

    def release(self) -> None:
        """Give memory that nothing uses any more back to the system."""
        mx.clear_cache()
        if _malloc_trim is not None:
            _malloc_trim(0)

    def nbytes(self, caches: Sequence[Any]) -> int:
        """Bytes of all leaves, unused room included."""
        return sum(leaf.nbytes for leaf in leaves(caches) if not leaf.empty())

    def arrays(self, caches: Sequence[Any]) -> int:
        """How many arrays the caches are."""
        states = [leaf.state for leaf in leaves(caches) if not leaf.empty()]
        return sum(isinstance(value, mx.array) for _, value in tree_flatten(states))

    def sliced_nbytes(self, caches: Sequence[Any]) -> int:
        """Bytes of the sliced leaves alone."""
        return sum(leaf.nbytes for leaf, _ in _sliced(caches) if not leaf.empty())


def settle(caches: Sequence[Any]) -> None:
    """Compute what is still lazy, and let go of larger arrays that leaves are views of.

    One leaf after the other, so that little is there twice (lesson 28).
    """
    for leaf in leaves(caches):
        if not leaf.empty():
            put_state(leaf, tree_map(_let_go, leaf.state))
            mx.eval(leaf.state)


def _emptied(leaf: Any, kind: Sliced, spans: Sequence[tuple[int, int]]) -> list[Arrays]:
    arrays = kind.arrays(leaf)
    parts = [tuple(_own(array[..., start:end, :]) for array in arrays) for start, end in spans]
    mx.eval(parts)
    leaf.keys = leaf.values = None
    return parts


def _own(array: mx.array) -> mx.array:
    """A copy in memory of its own. `mx.contiguous` makes none where that would save 16 KiB at most."""
    axis = next((axis for axis, size in enumerate(array.shape) if size > 1), None)
    if axis is None:
        return mx.contiguous(array)
    return mx.concatenate(list(mx.split(array, [1], axis=axis)), axis=axis)


def _let_go(value: Any) -> Any:
    """What is large, and no view of something much larger, is not copied."""
    if not isinstance(value, mx.array):
        return value
    return _own(value) if value.nbytes < _SMALL_BYTES else mx.contiguous(value)


def _one_behind_the_other(parts: Sequence[mx.array]) -> mx.array:
    return mx.concatenate(list(parts), axis=-2) if len(parts) > 1 else _own(parts[0])


def leaves(caches: Sequence[Any]) -> Iterator[Any]:
    """The caches themselves, out of those that hold several."""
    for cache in caches:
        if type(cache).__name__ == "CacheList":
            yield from leaves(cache.caches)
        else:
            yield cache


def _told(leaf: Any) -> str:
    """The class; a window that keeps its first tokens for good is another one."""
    name = type(leaf).__name__
    return f"{name}(keep={leaf.keep})" if getattr(leaf, "keep", 0) else name


def _sliced(caches: Sequence[Any]) -> list[tuple[Any, Sliced]]:
    return [(leaf, reuse) for leaf in leaves(caches) if isinstance(reuse := reuse_of(leaf), Sliced)]


def _whole(caches: Sequence[Any]) -> list[tuple[Any, Whole]]:
    return [(leaf, reuse) for leaf in leaves(caches) if isinstance(reuse := reuse_of(leaf), Whole)]
