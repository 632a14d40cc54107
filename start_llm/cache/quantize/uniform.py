"""Codes in even steps, by groups of elements.

A group of elements shares its largest magnitude. Codes count in steps of a part of it, from -127 to 127 (8
bits) or from -7 to 7 (4 bits). Keys at 8 bits have codes from -255 to 255, a ninth bit for the sign: the
attention of a model that is sure of what it looks at makes far more of an error in keys than in values
(docs/prompt-cache.md).

MLX's affine quantisation is not used: in bfloat16 its error grows with every turn (lesson 108).

Runs on the engine thread.
"""

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import mlx.core as mx

from start_llm.cache.quantize.packing import FLOAT32_BITS, Arrays, pack, packed_bytes, rounded, unpack

_LEAST_SCALE = 2.0**-100
"""Of a group of nothing but 0."""
_SCALE_BITS = {mx.float32: 15, mx.float16: FLOAT32_BITS, mx.bfloat16: FLOAT32_BITS}
"""To how many bits of their mantissa scales are rounded, by the type of the KV.

In float32, codes times scales are exact then. The shorter types tell fewer numbers apart than there are codes
near the largest of a group, but what they make of a code leads to a code that they make the same number of.
Either way a restored group is quantised to what it was restored from. This holds for every possible largest
magnitude (tests/cache/test_kv_bits.py tries them all).
"""
_SIGN = 256
"""The ninth bit."""


class UniformCodec(NamedTuple):
    """Quantises an array of a leaf.

    Attributes:
        dtype: of the array.
        width: elements of a row.
        rows: for each token.
        bits: of a code; the ninth is a sign.
        group: elements that share their largest magnitude.
    """

    dtype: mx.Dtype
    width: int
    rows: int
    bits: int
    group: int

    @property
    def most(self) -> int:
        """The largest code."""
        return 2 ** (self.bits - 1) - 1

    @property
    def token_bytes(self) -> int:
        """What the rows of a token take when they are quantised."""
        scales = self.width // self.group * self.dtype.size
        return self.rows * (packed_bytes(self.width, self.bits) + scales)

    def packed(self, array: mx.array) -> tuple[mx.array, mx.array]:
        """Return codes [..., tokens, bytes] and the largest magnitudes of groups [..., tokens, groups]."""
        groups = array.astype(mx.float32).reshape(*array.shape[:-1], -1, self.group)
        scales = _scales(mx.abs(groups).max(axis=-1, keepdims=True), self)
        codes = mx.clip(mx.round(groups / scales), -self.most, self.most)
        largest = (scales[..., 0] * self.most).astype(self.dtype)
        return _encoded(codes.reshape(array.shape), self), largest

    def restored(self, data: mx.array, largest: mx.array) -> mx.array:
        """Return the array [..., tokens, width]."""
        codes = _decoded(data, self).astype(mx.float32)
        groups = codes.reshape(*largest.shape, self.group)
        scales = _scales(largest.astype(mx.float32), self)
        return (groups * scales[..., None]).astype(self.dtype).reshape(codes.shape)


def uniform_codecs(bits: int, group_size: int, arrays: Arrays) -> Sequence[UniformCodec]:
    """Return a codec for each array of a leaf; () if the type or the width of some of them forbids it."""
    if not all(array.dtype in _SCALE_BITS and array.shape[-1] * bits % 8 == 0 for array in arrays):
        return ()
    wanted = [bits] * len(arrays)
    if bits == 8 and len(arrays) == 2 and arrays[0].shape[-1] % 8 == 0:
        wanted[0] = 9  # keys come first
    return tuple(_codec(array, count, group_size) for array, count in zip(arrays, wanted, strict=True))


def _codec(array: mx.array, bits: int, group_size: int) -> UniformCodec:
    width = array.shape[-1]
    rows = array.size // max(array.shape[-2] * width, 1)
    return UniformCodec(array.dtype, width, rows, bits, gcd(width, group_size))


def _scales(largest: mx.array, codec: UniformCodec) -> mx.array:
    """Return the steps of groups with these largest magnitudes, in float32."""
    return mx.maximum(rounded(largest * (1 / codec.most), _SCALE_BITS[codec.dtype]), _LEAST_SCALE)


def _encoded(codes: mx.array, codec: UniformCodec) -> mx.array:
    """Return the bytes of codes [..., width]."""
    if codec.bits == 9:
        return pack(mx.abs(codes).astype(mx.uint16) + _SIGN * (codes < 0).astype(mx.uint16), 9)
    if codec.bits == 8:
        return codes.astype(mx.int8)
    return pack((codes + codec.most).astype(mx.uint8), codec.bits)


def _decoded(data: mx.array, codec: UniformCodec) -> mx.array:
    """Return codes [..., width] as integers with a sign."""
    if codec.bits == 9:
        words = unpack(data, 9, codec.width).astype(mx.int16)
        return mx.where(words >= _SIGN, _SIGN - words, words)
    if codec.bits == 8:
        return data
    return unpack(data, codec.bits, codec.width).astype(mx.int8) - codec.most
