"""The caches of one network: cut into pages, copied, put together again.

A network has one cache for each layer, some of which hold several. What can be done with the *leaves* depends
on their class: `cache/kinds` has the table.

Runs on the engine thread. What is given out to be kept is contiguous and evaluated: no lazy slice keeps a
large buffer alive, and no array changes under its holder.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from start_llm.cache.arrays import Arrays, Borrowed, Cut, Part, Pieces, State, joined, own
from start_llm.cache.kinds import Sliced, Whole, put_state, reuse_of

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""glibc keeps what is freed between things that stay; MLX allocates with it on Linux (lesson 14)."""

_SPARE_SHARE = 16
"""Of a leaf's tokens, one of so many more may stay unused, and is what it grows by."""
_SMALL_BYTES = 2**20
"""Beside more than this, the 16 KiB that `mx.contiguous` may leave are nothing."""


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

    def fresh(self, room: int = 0) -> list[Any]:
        """Empty caches, one for each entry that the network expects.

        Args:
            room: tokens that they will take at once, when the first of them come.
        """
        # Not at the top: `start_llm.models` has to be the first to import mlx_lm (lesson 2).
        from mlx_lm.models.cache import make_prompt_cache  # noqa: PLC0415

        caches = make_prompt_cache(self._network)
        for leaf, _ in _sliced(caches):
            leaf.step = max(self._room, room)
        return caches

    def room(self, caches: Sequence[Any]) -> int:
        """Tokens that filled sliced leaves can hold without growing; 0 if there are none."""
        return min((_room(leaf, kind) for leaf, kind in _filled(caches)), default=0)

    def reserve(self, caches: Sequence[Any], room: int) -> None:
        """Let filled sliced leaves grow to `room` tokens, one after the other."""
        for leaf, kind in _filled(caches):
            if _room(leaf, kind) < room:
                _resize(leaf, kind, room)

    def grow_little(self, caches: Sequence[Any]) -> None:
        """What was reserved is there: if that is not enough, leaves grow by small shares of themselves."""
        for leaf, _ in _filled(caches):
            leaf.step = self._spare(leaf)

    def settle(self, caches: Sequence[Any]) -> None:
        """Caches that are kept: see `settle`. Of room that is not used, little stays."""
        for leaf, kind in _filled(caches):
            if _room(leaf, kind) - leaf.offset > self._spare(leaf):
                _resize(leaf, kind, leaf.offset)
        settle(caches)

    def _spare(self, leaf: Any) -> int:
        return max(self._room, int(leaf.offset) // _SPARE_SHARE)

    def view(self, caches: Sequence[Any], start: int, end: int) -> Cut:
        """Tokens `start` to `end` of all sliced leaves; not copied."""
        whole = Cut(tuple(kind.arrays(leaf) for leaf, kind in _sliced(caches)))
        return whole.part(start, end)

    def cut(self, caches: Sequence[Any], start: int, end: int) -> Cut:
        """Copies of tokens `start` to `end` of all sliced leaves."""
        cut = Cut(
            tuple(
                tuple(own(array[..., start:end, :]) for array in kind.arrays(leaf))
                for leaf, kind in _sliced(caches)
            )
        )
        mx.eval([array for leaf in cut.leaves for array in leaf])
        return cut

    def borrow(self, caches: Sequence[Any], start: int, end: int) -> Part:
        """Views of tokens `start` to `end` of all sliced leaves, which nobody holds once they are taken."""
        return Borrowed([leaf] for leaf in self.view(caches, start, end).leaves)

    def cut_out(self, caches: Sequence[Any], start: int, end: int) -> Pieces:
        """Copies of tokens `start` to `end` of all sliced leaves, at their positions."""
        return Pieces(self.cut(caches, start, end).leaves, start)

    def give_up(self, caches: Sequence[Any]) -> Pieces:
        """The very arrays of all sliced leaves, which the caches no longer have."""
        sliced = _sliced(caches)
        pieces = Pieces([kind.arrays(leaf) for leaf, kind in sliced])
        for leaf, _ in sliced:
            leaf.keys = leaf.values = None
        return pieces

    def state(self, caches: Sequence[Any]) -> State:
        """Copies of all whole leaves as they are now."""
        state = State(
            tuple(
                (tuple(own(array) for array in kind.arrays(leaf)), kind.numbers(leaf))
                for leaf, kind in _whole(caches)
            )
        )
        mx.eval([array for arrays, _ in state.leaves for array in arrays])
        return state

    def assemble(
        self,
        parts: Sequence[Part],
        state: State | None,
        length: int,
        copied: Callable[[int], None] = lambda _: None,
        *,
        room: int = 0,
    ) -> list[Any]:
        """Caches that hold `length` tokens: the parts one behind the other, and the state at their end.

        Args:
            room: tokens that they can take before they grow.
            copied: called with the number of a leaf that has been copied: what it was copied from can go.
        """
        caches = self.fresh()
        for index, (leaf, kind) in enumerate(_sliced(caches)):
            kind.fill(leaf, _put_together(parts, index, room))
            leaf.offset = length
            copied(index)
        if state is not None:
            self.set_state(caches, state)
        return caches

    def set_state(self, caches: Sequence[Any], state: State) -> None:
        """Put whole leaves back to a state. They get arrays of their own: some write into theirs."""
        for (leaf, kind), (arrays, numbers) in zip(_whole(caches), state.leaves, strict=True):
            copies = tuple(mx.array(array) for array in arrays)
            mx.eval(copies)
            kind.fill(leaf, copies, numbers)

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

    def token_bytes(self, caches: Sequence[Any]) -> int:
        """Bytes of each token in the sliced leaves."""
        filled = (kind.arrays(leaf) for leaf, kind in _filled(caches))
        return sum(array.nbytes // array.shape[-2] for arrays in filled for array in arrays)


def settle(caches: Sequence[Any]) -> None:
    """Compute what is still lazy, and let go of larger arrays that leaves are views of.

    One leaf after the other, so that little is there twice (lesson 28).
    """
    for leaf in leaves(caches):
        if not leaf.empty():
            put_state(leaf, tree_map(_let_go, leaf.state))
            mx.eval(leaf.state)


def _put_together(parts: Sequence[Part], index: int, room: int) -> Arrays:
    """One leaf of all parts, copied."""
    columns = zip(*(arrays for part in parts for arrays in part.take(index)), strict=True)
    whole = tuple(joined(column, room) for column in columns)
    mx.eval(whole)
    return whole


def _room(leaf: Any, kind: Sliced) -> int:
    return int(kind.arrays(leaf)[0].shape[-2])


def _resize(leaf: Any, kind: Sliced, room: int) -> None:
    arrays = tuple(joined([array[..., : leaf.offset, :]], room) for array in kind.arrays(leaf))
    mx.eval(arrays)
    kind.fill(leaf, arrays)


def _let_go(value: Any) -> Any:
    """What is large, and no view of something much larger, is not copied."""
    if not isinstance(value, mx.array):
        return value
    return own(value) if value.nbytes < _SMALL_BYTES else mx.contiguous(value)


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


def _filled(caches: Sequence[Any]) -> list[tuple[Any, Sliced]]:
    return [(leaf, kind) for leaf, kind in _sliced(caches) if not leaf.empty()]


def _whole(caches: Sequence[Any]) -> list[tuple[Any, Whole]]:
    return [(leaf, reuse) for leaf in leaves(caches) if isinstance(reuse := reuse_of(leaf), Whole)]
