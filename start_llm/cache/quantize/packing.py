"""Codes of a few bits as bytes, and numbers with few bits.

Runs on the engine thread.
"""

import mlx.core as mx

FLOAT32_BITS = 23
"""Bits of a mantissa in float32, without the first."""
_PLANES = (8, 4, 2, 1)

type Arrays = tuple[mx.array, ...]
"""Arrays of one leaf."""


def packed_bytes(width: int, bits: int) -> int:
    """Return the bytes of a row of `width` codes."""
    return sum(-(-width * plane // 8) for plane in _planes(bits))


def pack(codes: mx.array, bits: int) -> mx.array:
    """Return the bytes of codes [..., width] from 0 on.

    Lower bits come first. Nine bits are a byte for each code, and after these bytes one bit for each.
    """
    parts: list[mx.array] = []
    shift = 0
    for plane in _planes(bits):
        digits = ((codes >> shift) & (2**plane - 1)).astype(mx.uint8)
        parts.append(_together(digits, plane))
        shift += plane
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


def unpack(data: mx.array, bits: int, width: int) -> mx.array:
    """Return the codes [..., width] of bytes, as uint8, or uint16 if they have more than 8 bits."""
    codes = mx.zeros((*data.shape[:-1], width), mx.uint16 if bits > 8 else mx.uint8)
    shift = place = 0
    for plane in _planes(bits):
        end = place + packed_bytes(width, plane)
        codes = codes | (_apart(data[..., place:end], plane, width).astype(codes.dtype) << shift)
        shift, place = shift + plane, end
    return codes


def rounded(values: mx.array, bits: int) -> mx.array:
    """Return float32 numbers from 0 on, rounded to this many bits of their mantissa."""
    dropped = FLOAT32_BITS - bits
    if not dropped:
        return values
    words = mx.view(values, mx.uint32) + (1 << (dropped - 1))
    return mx.view(words & (2**32 - 2**dropped), mx.float32)


def _planes(bits: int) -> list[int]:
    """Return powers of two that add up to `bits`."""
    return [plane for plane in _PLANES if bits & plane]


def _together(digits: mx.array, plane: int) -> mx.array:
    count = 8 // plane
    if missing := -digits.shape[-1] % count:
        digits = mx.pad(digits, [(0, 0)] * (digits.ndim - 1) + [(0, missing)])
    data = digits[..., ::count]
    for place in range(1, count):
        data = data | (digits[..., place::count] << (place * plane))
    return data


def _apart(data: mx.array, plane: int, width: int) -> mx.array:
    count = 8 // plane
    if count == 1:
        return data
    digits = mx.stack([(data >> (place * plane)) & (2**plane - 1) for place in range(count)], axis=-1)
    return digits.reshape(*data.shape[:-1], -1)[..., :width]
