"""Quantise the KV of pages at rest, and restore it.

A group of elements shares a scale, with codes from -127 to 127 (8 bits) or from -7 to 7 (4 bits). The scale
is rounded so far that codes times scales survive in the KV's own type. Quantising what was restored therefore
gives the same codes and scales again, to the bit: a conversation whose pages are restored and cut in every
turn loses its precision once. MLX's affine quantisation does not have this property. In bfloat16 its error
grows with every turn (lesson 108).

Runs on the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from start_llm.cache.arrays import Arrays
from start_llm.cache.kv_format import KVFormat

_LEAST_SCALE = 2.0**-24
"""The smallest number of float16."""
_FLOAT32_BITS = 23
"""Bits of a mantissa in float32, without the first."""


class _Rounding(NamedTuple):
    """How scales are rounded.

    Attributes:
        bits: of the mantissa, without the first.
        dtype: in which they are stored.
    """

    bits: int
    dtype: mx.Dtype


_ROUNDING = {
    mx.float32: _Rounding(15, mx.float32),
    mx.float16: _Rounding(7, mx.bfloat16),
    mx.bfloat16: _Rounding(7, mx.bfloat16),
}
"""By the type of the KV.

The largest code times its scale, rounded to that type, must lead to the same scale again, and every other
code to itself. This holds for every possible largest magnitude (tests/cache/test_kv_bits.py tries them all).
"""


class _KVSource(NamedTuple):
    """An array of a leaf as sequences have it: its type, its width, and its rows for each token."""

    dtype: mx.Dtype
    width: int
    rows: int


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
        """Return codes and scales of each array of a leaf; the arrays themselves if they are quantised."""
        if not self.sources[index] or self._is_packed(index, arrays):
            return arrays
        return tuple(part for array in arrays for part in _quantized(array, self.format))

    def unpacked(self, index: int, arrays: Arrays) -> Arrays:
        """Return the arrays of a leaf as sequences have them."""
        if not self._is_packed(index, arrays):
            return arrays
        pairs = zip(self.sources[index], arrays[::2], arrays[1::2], strict=True)
        return tuple(_restored(codes, scales, source, self.format) for source, codes, scales in pairs)

    def token_bytes(self, index: int) -> int:
        """Return the bytes of a token in a quantised leaf."""
        return sum(
            source.rows * (source.width * self.format.bits // 8 + self._scale_bytes(source))
            for source in self.sources[index]
        )

    def _scale_bytes(self, source: _KVSource) -> int:
        groups = source.width // self.format.group_of(source.width)
        return groups * _ROUNDING[source.dtype].dtype.size

    def packed_count(self, index: int) -> int:
        """Return the number of arrays of a leaf that is quantised; 0 if it stays as it is."""
        return 2 * len(self.sources[index])

    def _is_packed(self, index: int, arrays: Arrays) -> bool:
        return bool(self.sources[index]) and len(arrays) == self.packed_count(index)


def _sources(form: KVFormat, arrays: Arrays) -> tuple[_KVSource, ...]:
    """Return () for a leaf that some of its arrays forbid to quantise: the model has quantised it itself."""
    fits = all(array.dtype in _ROUNDING and array.shape[-1] * form.bits % 8 == 0 for array in arrays)
    return tuple(_KVSource(array.dtype, array.shape[-1], _rows(array)) for array in arrays) if fits else ()


def _rows(array: mx.array) -> int:
    return array.size // max(array.shape[-2] * array.shape[-1], 1)


def _quantized(array: mx.array, form: KVFormat) -> tuple[mx.array, mx.array]:
    """Return codes [..., tokens, bytes] and scales [..., tokens, groups]."""
    groups = array.astype(mx.float32).reshape(*array.shape[:-1], -1, form.group_of(array.shape[-1]))
    most, rounding = _most(form), _ROUNDING[array.dtype]
    scales = _scales(mx.abs(groups).max(axis=-1), most, rounding.bits)
    codes = mx.clip(mx.round(groups / scales[..., None]), -most, most).reshape(array.shape)
    if form.bits == 8:
        return codes.astype(mx.int8), scales.astype(rounding.dtype)
    halves = (codes + most).astype(mx.uint8)
    return halves[..., ::2] | (halves[..., 1::2] << 4), scales.astype(rounding.dtype)


def _most(form: KVFormat) -> int:
    """Return the largest code."""
    return 2 ** (form.bits - 1) - 1


def _scales(largest: mx.array, most: int, bits: int) -> mx.array:
    """Return the scales of groups with these largest magnitudes, in float32."""
    dropped = _FLOAT32_BITS - bits
    words = mx.view(largest * (1 / most), mx.uint32) + (1 << (dropped - 1))
    return mx.maximum(mx.view(words & (2**32 - 2**dropped), mx.float32), _LEAST_SCALE)


def _restored(codes: mx.array, scales: mx.array, source: _KVSource, form: KVFormat) -> mx.array:
    if form.bits == 4:
        halves = mx.stack([codes & 15, codes >> 4], axis=-1)
        codes = halves.reshape(*codes.shape[:-1], source.width).astype(mx.int8) - _most(form)
    groups = codes.astype(mx.float32).reshape(*scales.shape, form.group_of(source.width))
    return (groups * scales[..., None].astype(mx.float32)).astype(source.dtype).reshape(codes.shape)
