"""Arrays that are cut out of KV caches, and from which KV caches are assembled.

Runs on the engine thread. Stored arrays are contiguous and evaluated, so that no lazy slice keeps a large
buffer alive and no array changes after it is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx

from start_llm.cache.quantize.packing import Arrays

if TYPE_CHECKING:
    from start_llm.cache.quantize.quantizer import KVQuantizer

LONGEST_PIECE = 4096
"""Tokens of the longest piece.

Dropping some tokens of a leaf copies at most one piece; shorter pieces would mean more arrays.
"""


@dataclass(frozen=True, slots=True)
class KVSlice:
    """Consecutive tokens of all trimmable leaves."""

    leaves: tuple[Arrays, ...]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for leaf in self.leaves for array in leaf)

    @property
    def arrays(self) -> int:
        return sum(len(leaf) for leaf in self.leaves)

    def part(self, start: int, end: int) -> KVSlice:
        """Return tokens `start` to `end` of these as views."""
        return KVSlice(tuple(_span(leaf, start, end) for leaf in self.leaves))

    def take(self, index: int) -> list[Arrays]:
        """Return one leaf."""
        return [self.leaves[index]]


class BorrowedArrays:
    """Views of arrays that somebody else owns.

    Args:
        leaves: for each leaf its arrays in token order.
    """

    def __init__(self, leaves: Iterable[list[Arrays]]) -> None:
        self._leaves = list(leaves)

    def take(self, index: int) -> list[Arrays]:
        """Return the views of one leaf in token order, and drop them. Called once for each leaf."""
        views, self._leaves[index] = self._leaves[index], []
        return views


type TokenRange = KVSlice | BorrowedArrays
"""Consecutive tokens of all trimmable leaves, to be copied into caches."""


type LeafState = tuple[Arrays, tuple[int, ...]]
"""The arrays of a non-trimmable leaf, and its numbers."""


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """The state of all non-trimmable leaves at one position.

    Attributes:
        reach: tokens by which it can be taken back to an earlier position.
    """

    leaves: tuple[LeafState, ...]
    reach: int = 0

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for arrays, _ in self.leaves for array in arrays)

    @property
    def arrays(self) -> int:
        return sum(len(arrays) for arrays, _ in self.leaves)


class _Piece(NamedTuple):
    """Tokens of one leaf from position `start` on.

    Attributes:
        is_at_rest: the arrays are as pages keep them. If not, they may have to be quantised.
    """

    start: int
    arrays: Arrays
    is_at_rest: bool = False

    @property
    def end(self) -> int:
        return self.start + self.arrays[0].shape[-2]

    def within(self, start: int, end: int) -> Arrays:
        """Return views of the tokens between these positions; () if there are none."""
        first, last = max(start, self.start), min(end, self.end)
        return _span(self.arrays, first - self.start, last - self.start) if first < last else ()


class KVPieces:
    """Consecutive tokens of all trimmable leaves. Each leaf has its own pieces and can be cut by itself.

    Args:
        leaves: arrays whose first token is at position `start`; () for a leaf that stays empty, which has no
            pieces.
        packer: quantises what is kept; None keeps it as it is.

    Attributes:
        nbytes, arrays: of all pieces.
    """

    def __init__(self, leaves: Sequence[Arrays], start: int = 0, packer: KVQuantizer | None = None) -> None:
        self._leaves = [[_Piece(start, arrays)] if arrays else [] for arrays in leaves]
        self._packer = packer
        self.nbytes = sum(array.nbytes for arrays in leaves for array in arrays)
        self.arrays = sum(len(arrays) for arrays in leaves)
        self._token_bytes = [sum(array.nbytes // array.shape[-2] for array in arrays) for arrays in leaves]

    def __len__(self) -> int:
        """Return the number of leaves."""
        return len(self._leaves)

    def bytes_of(self, start: int, end: int) -> int:
        """Return the bytes that the tokens between these positions take once `keep` has run for each leaf."""
        exact = max(min(end, self._packer.format.start) - start, 0) if self._packer else end - start
        return sum(
            exact * token_bytes + (end - start - exact) * self._packed_bytes(index)
            for index, token_bytes in enumerate(self._token_bytes)
        )

    def _packed_bytes(self, index: int) -> int:
        if self._packer and self._packer.quantizes(index):
            return self._packer.token_bytes(index)
        return self._token_bytes[index]

    def part(self, start: int, end: int) -> TokenRange:
        """Return views of the tokens between these positions."""
        return BorrowedArrays(_views(pieces, start, end) for pieces in self._leaves)

    def is_trimmed(self, index: int, start: int, end: int) -> bool:
        """Return whether a leaf holds only tokens between these positions, in pieces that are not too long
        and as pages keep them.
        """
        return all(self._is_neat(index, piece, start, end) for piece in self._leaves[index])

    def keep(self, index: int, start: int, end: int) -> None:
        """Drop a leaf's tokens outside of these positions. What is cut or quantised is copied, one leaf at a
        time.
        """
        before, self._leaves[index] = self._leaves[index], []
        try:
            after = [kept for piece in before for kept in self._kept(index, piece, start, end)]
            mx.eval([piece.arrays for piece in after])
        except BaseException:
            self._leaves[index] = before
            raise
        self._leaves[index] = after
        self.nbytes += _nbytes(after) - _nbytes(before)
        self.arrays += _count(after) - _count(before)

    def _is_neat(self, index: int, piece: _Piece, start: int, end: int) -> bool:
        fits = start <= piece.start and piece.end <= end and piece.end - piece.start <= LONGEST_PIECE
        return fits and (piece.is_at_rest or piece.end <= self._exact_until(index, piece.end))

    def _exact_until(self, index: int, end: int) -> int:
        """Return the position from which a leaf is quantised; `end` if it never is."""
        return self._packer.format.start if self._packer and self._packer.quantizes(index) else end

    def _kept(self, index: int, piece: _Piece, start: int, end: int) -> list[_Piece]:
        """Return the part of a piece between these positions: the piece itself, or copies."""
        if self._is_neat(index, piece, start, end):
            return [piece]
        first, last = max(start, piece.start), min(end, piece.end)
        middle = last if piece.is_at_rest else min(max(first, self._exact_until(index, last)), last)
        exact = [
            _Piece(at, tuple(map(owned_copy, piece.within(at, to))), piece.is_at_rest)
            for at, to in _steps(first, middle)
        ]
        return exact + [
            _Piece(at, self._packed(index, piece.within(at, to)), is_at_rest=True)
            for at, to in _steps(middle, last)
        ]

    def _packed(self, index: int, arrays: Arrays) -> Arrays:
        return self._packer.packed(index, arrays) if self._packer else arrays


def _steps(start: int, end: int) -> list[tuple[int, int]]:
    """Return the start and end of each piece between these positions."""
    return [(at, min(at + LONGEST_PIECE, end)) for at in range(start, end, LONGEST_PIECE)]


def _span(arrays: Arrays, start: int, end: int) -> Arrays:
    return tuple(array[..., start:end, :] for array in arrays)


def _views(pieces: Sequence[_Piece], start: int, end: int) -> list[Arrays]:
    return [views for piece in pieces if (views := piece.within(start, end))]


def _nbytes(pieces: Sequence[_Piece]) -> int:
    return sum(array.nbytes for piece in pieces for array in piece.arrays)


def _count(pieces: Sequence[_Piece]) -> int:
    return sum(len(piece.arrays) for piece in pieces)


def owned_copy(array: mx.array) -> mx.array:
    """Return a copy in its own buffer. `mx.contiguous` makes no copy where that would save 16 KiB at most."""
    axis = next((axis for axis, size in enumerate(array.shape) if size > 1), None)
    if axis is None:
        return mx.contiguous(array)
    return mx.concatenate(list(mx.split(array, [1], axis=axis)), axis=axis)


def joined(parts: Sequence[mx.array], length: int = 0) -> mx.array:
    """Concatenate copies along the token axis, padded with zeros to `length` tokens."""
    done = sum(part.shape[-2] for part in parts)
    if done < length:
        first = parts[0]
        room = mx.zeros((*first.shape[:-2], length - done, first.shape[-1]), first.dtype)
        return mx.concatenate([*parts, room], axis=-2) if done else room
    return mx.concatenate(list(parts), axis=-2) if len(parts) > 1 else owned_copy(parts[0])
