"""Quantise the KV of pages at rest, and restore it.

A group of elements shares its largest magnitude. Codes count in steps of a part of it, from -127 to 127 (8
bits) or from -7 to 7 (4 bits). Keys at 8 bits have codes from -255 to 255, a ninth bit for the sign: the
attention of a model that is sure of what it looks at makes far more of an error in keys than in values, and
with this bit the loss stays below 1e-4 nats in the mean (docs/prompt-cache.md).

Codes are chosen so that quantising what was restored gives them again, to the bit: a conversation whose pages
are restored and cut in every turn loses its precision once. MLX's affine quantisation does not have this
property. In bfloat16 its error grows with every turn (lesson 108).

Runs on the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from start_llm.cache.arrays import Arrays
from start_llm.cache.kv_format import KVFormat

_LEAST_SCALE = 2.0**-100
"""Of a group of nothing but 0."""
_FLOAT32_BITS = 23
"""Bits of a mantissa in float32, without the first."""
_SCALE_BITS = {mx.float32: 15, mx.float16: _FLOAT32_BITS, mx.bfloat16: _FLOAT32_BITS}
"""To how many bits of their mantissa scales are rounded, by the type of the KV.

In float32, codes times scales are exact then. The shorter types tell fewer numbers apart than there are codes
near the largest of a group, but what they make of a code leads to a code that they make the same number of.
Either way a restored group is quantised to what it was restored from. This holds for every possible largest
magnitude (tests/cache/test_kv_bits.py tries them all).
"""
_SIGNS = 8
"""So many signs are in a byte."""


class _KVSource(NamedTuple):
    """An array of a leaf as sequences have it.

    Attributes:
        dtype: its type.
        width: elements of a row.
        rows: for each token.
        bits: of a code; the ninth is a sign, and stands behind the codes.
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
        return self.rows * (self.width * self.bits // 8 + self.width // self.group * self.dtype.size)


@dataclass(frozen=True, slots=True)
class KVQuantizer:
    """Quantises the arrays of a network's trimmable leaves.

    Attributes:
        sources: for each leaf its arrays; () if the leaf stays as it is.
    """

    format: KVFormat
    sources: tuple[tuple[_KVSource, ...], ...]

    @classmethod
    def of(cls, form: KVFormat, leaves: Sequence[Arrays]) -> KVQuantizer:
        """Return a quantiser for leaves like these, which hold some tokens."""
        return cls(form, tuple(_sources(form, arrays) for arrays in leaves))

    @property
    def start(self) -> int:
        """Position of the first token that is quantised."""
        return self.format.start

    def quantizes(self, index: int) -> bool:
        """Return whether this leaf is quantised."""
        return bool(self.sources[index])

    def packed(self, index: int, arrays: Arrays) -> Arrays:
        """Return codes and largest magnitudes of each array of a leaf; themselves if they are quantised."""
        if not self.sources[index] or self._is_packed(index, arrays):
            return arrays
        pairs = zip(self.sources[index], arrays, strict=True)
        return tuple(part for source, array in pairs for part in _quantized(array, source))

    def unpacked(self, index: int, arrays: Arrays) -> Arrays:
        """Return the arrays of a leaf as sequences have them."""
        if not self._is_packed(index, arrays):
            return arrays
        pairs = zip(self.sources[index], arrays[::2], arrays[1::2], strict=True)
        return tuple(_restored(codes, largest, source) for source, codes, largest in pairs)

    def token_bytes(self, index: int) -> int:
        """Return the bytes of a token in a quantised leaf."""
        return sum(source.token_bytes for source in self.sources[index])

    def packed_count(self, index: int) -> int:
        """Return the number of arrays of a leaf that is quantised; 0 if it stays as it is."""
        return 2 * len(self.sources[index])

    def _is_packed(self, index: int, arrays: Arrays) -> bool:
        return bool(self.sources[index]) and len(arrays) == self.packed_count(index)


def _sources(form: KVFormat, arrays: Arrays) -> tuple[_KVSource, ...]:
    """Return () for a leaf that some of its arrays forbid to quantise: the model has quantised it itself."""
    if not all(array.dtype in _SCALE_BITS and array.shape[-1] * form.bits % 8 == 0 for array in arrays):
        return ()
    bits = [form.bits] * len(arrays)
    if form.bits == 8 and len(arrays) == 2 and arrays[0].shape[-1] % _SIGNS == 0:
        bits[0] = 9  # keys come first
    return tuple(_source(array, count, form) for array, count in zip(arrays, bits, strict=True))


def _source(array: mx.array, bits: int, form: KVFormat) -> _KVSource:
    width = array.shape[-1]
    rows = array.size // max(array.shape[-2] * width, 1)
    return _KVSource(array.dtype, width, rows, bits, form.group_of(width))


def _quantized(array: mx.array, source: _KVSource) -> tuple[mx.array, mx.array]:
    """Return codes [..., tokens, bytes] and the largest magnitudes of groups [..., tokens, groups]."""
    groups = array.astype(mx.float32).reshape(*array.shape[:-1], -1, source.group)
    scales = _scales(mx.abs(groups).max(axis=-1, keepdims=True), source)
    codes = mx.clip(mx.round(groups / scales), -source.most, source.most)
    largest = (scales[..., 0] * source.most).astype(source.dtype)
    return _encoded(codes.reshape(array.shape), source), largest


def _restored(data: mx.array, largest: mx.array, source: _KVSource) -> mx.array:
    codes = _decoded(data, source).astype(mx.float32)
    groups = codes.reshape(*largest.shape, source.group)
    scales = _scales(largest.astype(mx.float32), source)
    return (groups * scales[..., None]).astype(source.dtype).reshape(codes.shape)


def _scales(largest: mx.array, source: _KVSource) -> mx.array:
    """Return the steps of groups with these largest magnitudes, in float32."""
    scales = largest * (1 / source.most)
    if dropped := _FLOAT32_BITS - _SCALE_BITS[source.dtype]:
        words = mx.view(scales, mx.uint32) + (1 << (dropped - 1))
        scales = mx.view(words & (2**32 - 2**dropped), mx.float32)
    return mx.maximum(scales, _LEAST_SCALE)


def _encoded(codes: mx.array, source: _KVSource) -> mx.array:
    """Return the bytes of codes [..., width]."""
    if source.bits == 9:
        signs = (codes < 0).reshape(*codes.shape[:-1], -1, _SIGNS).astype(mx.uint8)
        bits = mx.left_shift(signs, mx.arange(_SIGNS, dtype=mx.uint8)).sum(axis=-1)
        return mx.concatenate([mx.abs(codes).astype(mx.uint8), bits.astype(mx.uint8)], axis=-1)
    if source.bits == 8:
        return codes.astype(mx.int8)
    halves = (codes + source.most).astype(mx.uint8)
    return halves[..., ::2] | (halves[..., 1::2] << 4)


def _decoded(data: mx.array, source: _KVSource) -> mx.array:
    """Return codes [..., width] as integers with a sign."""
    if source.bits == 9:
        magnitudes, bits = data[..., : source.width].astype(mx.int16), data[..., source.width :]
        signs = mx.right_shift(bits[..., None], mx.arange(_SIGNS, dtype=mx.uint8)) & 1
        return mx.where(signs.reshape(magnitudes.shape) == 1, -magnitudes, magnitudes)
    if source.bits == 8:
        return data
    halves = mx.stack([data & 15, data >> 4], axis=-1)
    return halves.reshape(*data.shape[:-1], source.width).astype(mx.int8) - source.most
