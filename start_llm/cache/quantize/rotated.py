"""Codes of rotated rows, in steps that suit a normal distribution.

A row is the key or the value of one head for one token. A fixed random rotation spreads what single channels
have over all of them, so that the elements of every row are nearly normally distributed. They are stored as
their largest magnitude, and codes for the nearest of 2^bits levels, which lie closer around 0 than at the
ends. This is TurboQuant (Zandieh et al., 2025) without its second stage, and with the largest magnitude for
the Euclidean norm: the outer levels then fit each row, and what was restored is quantised to the same again.

The largest element of a restored row is the outermost level. Rounding to the type of the KV moves it by less
than scales are apart, and the others by less than levels are apart.

Runs on the engine thread.
"""

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from random import Random
from statistics import NormalDist
from typing import NamedTuple

import mlx.core as mx

from start_llm.cache.quantize.packing import Arrays, pack, packed_bytes, rounded, unpack

_SCALE_BITS = 5
"""To how many bits of their mantissa scales are rounded.

Two scales are at least 1/64 apart, and bfloat16 moves a number by at most 1/256. That scales are coarse costs
next to nothing, as codes are chosen for the rounded ones.
"""
_LEAST_SCALE = {mx.float32: 2.0**-60, mx.float16: 2.0**-13, mx.bfloat16: 2.0**-60}
"""Rows that are smaller are restored as 0. Below it, float16 would round elements too coarsely."""


class RotatedCodec(NamedTuple):
    """Quantises an array of a leaf.

    Attributes:
        dtype: of the array.
        width: elements of a row.
        rows: for each token.
        bits: of a code.
    """

    dtype: mx.Dtype
    width: int
    rows: int
    bits: int

    @property
    def token_bytes(self) -> int:
        """What the rows of a token take when they are quantised."""
        return self.rows * (packed_bytes(self.width, self.bits) + self.dtype.size)

    def packed(self, array: mx.array) -> tuple[mx.array, mx.array]:
        """Return codes [..., tokens, bytes] and largest magnitudes of rotated rows [..., tokens, 1]."""
        rows = _rotated(array.astype(mx.float32))
        scales = rounded(mx.abs(rows).max(axis=-1, keepdims=True), _SCALE_BITS)
        scales = mx.where(scales < _LEAST_SCALE[self.dtype], 0.0, scales)
        codes = self._codes(mx.where(scales == 0, 0.0, rows / scales))
        return pack(codes, self.bits), scales.astype(self.dtype)

    def restored(self, data: mx.array, scales: mx.array) -> mx.array:
        """Return the array [..., tokens, width]."""
        levels = _level_array(self.width, self.bits)[unpack(data, self.bits, self.width)]
        return _rotated_back(levels * scales.astype(mx.float32)).astype(self.dtype)

    def _codes(self, rows: mx.array) -> mx.array:
        """Return the index of the nearest level of each number."""
        half = 2 ** (self.bits - 1)
        sizes, steps = mx.abs(rows), mx.zeros(rows.shape, mx.uint8)
        for low, high in pairwise(upper_levels(self.width, self.bits)):
            steps = steps + (sizes > (low + high) / 2).astype(mx.uint8)
        return mx.where(rows < 0, half - 1 - steps, half + steps).astype(mx.uint8)


def rotated_codecs(key_bits: int, value_bits: int, arrays: Arrays) -> Sequence[RotatedCodec]:
    """Return a codec for each array of a leaf; () unless they are keys and values of a type that has one."""
    if len(arrays) != 2 or any(array.dtype not in _LEAST_SCALE or array.shape[-1] < 2 for array in arrays):
        return ()
    return tuple(_codec(array, bits) for array, bits in zip(arrays, (key_bits, value_bits), strict=True))


def _codec(array: mx.array, bits: int) -> RotatedCodec:
    width = array.shape[-1]
    return RotatedCodec(array.dtype, width, array.size // max(array.shape[-2] * width, 1), bits)


# ---------------------------------------------------------------------------------------------- the rotation


@cache
def _signs(width: int, turn: int) -> mx.array:
    """Return random signs [width], the same ones in every process."""
    bits = Random(f"{turn} of {width}").getrandbits(width)
    signs = mx.array([1.0 if bits >> place & 1 else -1.0 for place in range(width)])
    mx.eval(signs)
    return signs


def _spans(width: int) -> list[tuple[int, int]]:
    """Return the parts of a row that are rotated one after the other.

    The length of each is a power of two. A row of another width is rotated at its beginning, then at its end.
    """
    length = 1 << (width.bit_length() - 1)
    return [(0, length), (width - length, width)][: 1 if length == width else 2]


def _rotated(rows: mx.array) -> mx.array:
    width = rows.shape[-1]
    for turn, (start, end) in enumerate(_spans(width)):
        part = mx.hadamard_transform(rows[..., start:end] * _signs(end - start, turn))
        rows = _replaced(rows, start, end, part)
    return rows


def _rotated_back(rows: mx.array) -> mx.array:
    width = rows.shape[-1]
    for turn, (start, end) in reversed(list(enumerate(_spans(width)))):
        part = mx.hadamard_transform(rows[..., start:end]) * _signs(end - start, turn)
        rows = _replaced(rows, start, end, part)
    return rows


def _replaced(rows: mx.array, start: int, end: int, part: mx.array) -> mx.array:
    around = (rows[..., :start], part, rows[..., end:])
    parts = [piece for piece in around if piece.shape[-1]]
    return mx.concatenate(parts, axis=-1) if len(parts) > 1 else part


# ------------------------------------------------------------------------------------------------- the levels


@cache
def upper_levels(width: int, bits: int) -> tuple[float, ...]:
    """Return the levels above 0 for rows of this width, ascending; the last one is 1.

    They are as dense as the cube root of a normal distribution, which has the least mean square error (Panter
    and Dite). The last one is what the largest element of a row exceeds in half of all rows.
    """
    count = 2 ** (bits - 1)
    largest = NormalDist().inv_cdf((1 + 0.5 ** (1 / width)) / 2)
    density = NormalDist(sigma=math.sqrt(3))
    share = density.cdf(largest) - 0.5
    places = [(2 * place + 1) / (2 * count - 1) for place in range(count)]
    return (*(density.inv_cdf(0.5 + share * place) / largest for place in places[:-1]), 1.0)


@cache
def _level_array(width: int, bits: int) -> mx.array:
    """Return all levels [2^bits], ascending."""
    upper = upper_levels(width, bits)
    levels = mx.array([-level for level in reversed(upper)] + list(upper))
    mx.eval(levels)
    return levels
