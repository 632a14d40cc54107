"""Arrays of many tokens, whoever keeps them: what is cut out of caches, and what caches are made of.

Runs on the engine thread. What is kept is contiguous and evaluated: no lazy slice keeps a large buffer alive,
and no array changes under its holder.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import mlx.core as mx

LONGEST_PIECE = 4096
"""Tokens. Whoever lets some tokens of a leaf go copies one piece at most; and pieces cost arrays."""

type Arrays = tuple[mx.array, ...]
"""Arrays of one leaf."""


class Part(Protocol):
    """Consecutive tokens of all sliced leaves, on their way into caches."""

    def take(self, index: int) -> list[Arrays]:
        """Views of one leaf, one behind the other. Asked once for each: nothing holds them afterwards."""
        ...


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
        return Cut(tuple(_span(leaf, start, end) for leaf in self.leaves))

    def take(self, index: int) -> list[Arrays]:
        return [self.leaves[index]]


class Borrowed:
    """Views of somebody's arrays: each leaf goes when it is taken.

    Args:
        leaves: for each leaf its arrays, one behind the other.
    """

    def __init__(self, leaves: Iterable[list[Arrays]]) -> None:
        self._leaves = list(leaves)

    def take(self, index: int) -> list[Arrays]:
        views, self._leaves[index] = self._leaves[index], []
        return views


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


class _Piece(NamedTuple):
    """Tokens of one leaf from `start` on."""

    start: int
    arrays: Arrays

    @property
    def end(self) -> int:
        return self.start + self.arrays[0].shape[-2]

    def within(self, start: int, end: int) -> Arrays:
        """Views of the tokens that lie between these positions; () if there are none."""
        first, last = max(start, self.start), min(end, self.end)
        return _span(self.arrays, first - self.start, last - self.start) if first < last else ()


class Pieces:
    """Consecutive tokens of all sliced leaves, each in pieces of its own, so that they can be cut one by one.

    Args:
        leaves: arrays whose first token is at position `start`.

    Attributes:
        nbytes, arrays: of all pieces.
        token_bytes: of each token.
    """

    def __init__(self, leaves: Sequence[Arrays], start: int = 0) -> None:
        self._leaves = [[_Piece(start, arrays)] for arrays in leaves]
        self.nbytes = sum(array.nbytes for arrays in leaves for array in arrays)
        self.arrays = sum(len(arrays) for arrays in leaves)
        self.token_bytes = sum(array.nbytes // array.shape[-2] for arrays in leaves for array in arrays)

    def __len__(self) -> int:
        """How many leaves there are."""
        return len(self._leaves)

    def covers(self, start: int, end: int) -> bool:
        """Whether every leaf has all tokens between these positions."""
        return all(_has_all(pieces, start, end) for pieces in self._leaves)

    def part(self, start: int, end: int) -> Part:
        """Views of the tokens between these positions."""
        return Borrowed(_views(pieces, start, end) for pieces in self._leaves)

    def is_neat(self, index: int, start: int, end: int) -> bool:
        """Whether a leaf has only tokens between these positions, in pieces that are not too long."""
        return all(_is_neat(piece, start, end) for piece in self._leaves[index])

    def keep(self, index: int, start: int, end: int) -> None:
        """Let go of what a leaf has outside of these positions. What is cut is copied, one leaf at a time."""
        before, self._leaves[index] = self._leaves[index], []
        try:
            after = [kept for piece in before for kept in _kept(piece, start, end)]
            mx.eval([piece.arrays for piece in after])
        except BaseException:
            self._leaves[index] = before
            raise
        self._leaves[index] = after
        self.nbytes += _nbytes(after) - _nbytes(before)
        self.arrays += _count(after) - _count(before)


def _span(arrays: Arrays, start: int, end: int) -> Arrays:
    return tuple(array[..., start:end, :] for array in arrays)


def _views(pieces: Sequence[_Piece], start: int, end: int) -> list[Arrays]:
    return [views for piece in pieces if (views := piece.within(start, end))]


def _has_all(pieces: Sequence[_Piece], start: int, end: int) -> bool:
    reached = start
    for piece in pieces:
        if piece.start <= reached:
            reached = max(reached, piece.end)
    return reached >= end


def _is_neat(piece: _Piece, start: int, end: int) -> bool:
    return start <= piece.start and piece.end <= end and piece.end - piece.start <= LONGEST_PIECE


def _kept(piece: _Piece, start: int, end: int) -> list[_Piece]:
    """What of a piece lies between these positions: itself, or copies."""
    if _is_neat(piece, start, end):
        return [piece]
    first, last = max(start, piece.start), min(end, piece.end)
    return [
        _Piece(at, tuple(map(own, piece.within(at, min(at + LONGEST_PIECE, last)))))
        for at in range(first, last, LONGEST_PIECE)
    ]


def _nbytes(pieces: Sequence[_Piece]) -> int:
    return sum(array.nbytes for piece in pieces for array in piece.arrays)


def _count(pieces: Sequence[_Piece]) -> int:
    return sum(len(piece.arrays) for piece in pieces)


def own(array: mx.array) -> mx.array:
    """A copy in memory of its own. `mx.contiguous` makes none where that would save 16 KiB at most."""
    axis = next((axis for axis, size in enumerate(array.shape) if size > 1), None)
    if axis is None:
        return mx.contiguous(array)
    return mx.concatenate(list(mx.split(array, [1], axis=axis)), axis=axis)


def joined(parts: Sequence[mx.array], length: int = 0) -> mx.array:
    """One array of all these, one behind the other, with zeros behind them up to `length` tokens."""
    missing = length - sum(part.shape[-2] for part in parts)
    if missing > 0:
        first = parts[0]
        room = mx.zeros((*first.shape[:-2], missing, first.shape[-1]), first.dtype)
        return mx.concatenate([*parts, room], axis=-2)
    return mx.concatenate(list(parts), axis=-2) if len(parts) > 1 else own(parts[0])
