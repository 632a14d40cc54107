"""Decodes compressed request bodies, up to a length."""

import zlib
from collections.abc import Mapping

from backports import zstd

from start_llm.core.errors import InvalidRequest, UnsupportedMediaType, body_too_large

IDENTITY = "identity"
_WITH_GZIP_HEADER, _WITHOUT_HEADER = 16 + zlib.MAX_WBITS, -zlib.MAX_WBITS
_CODINGS = ("gzip", "x-gzip", "deflate", "zstd")
_ZLIB_METHOD, _ZLIB_CHECK = 8, 31
_LARGEST_WINDOW: Mapping[int, int] = {zstd.DecompressionParameter.window_log_max: 23}
"""8 MiB, as RFC 9659 says for HTTP: a decoder takes that much memory before it has anything to show."""


def content_coding(header: str | None) -> str:
    """Return the coding that a Content-Encoding header names.

    Raises:
        UnsupportedMediaType: it cannot be decoded here.
    """
    coding = (header or IDENTITY).strip().lower()
    if coding not in (*_CODINGS, IDENTITY):
        raise UnsupportedMediaType(
            f"The Content-Encoding of a body must be gzip, deflate, zstd or identity, not {coding[:80]}."
        )
    return coding


def decoded(body: bytes, coding: str, max_bytes: int) -> bytes:
    """Return what a body of this coding says.

    Raises:
        BodyTooLarge: it says more than the limit.
        InvalidRequest: it is not of this coding, or not whole.
    """
    if coding == IDENTITY:
        return body
    decompressor = (
        zstd.ZstdDecompressor(options=_LARGEST_WINDOW)
        if coding == "zstd"
        else zlib.decompressobj(_window(body, coding))
    )
    try:
        decompressed = decompressor.decompress(body, max_bytes + 1)
    except (zlib.error, zstd.ZstdError) as error:
        raise InvalidRequest(f"The body is not what its Content-Encoding, {coding}, says.") from error
    if len(decompressed) > max_bytes:
        raise body_too_large(max_bytes)
    if not decompressor.eof or decompressor.unused_data:
        raise InvalidRequest(f"The body is not one whole stream of its Content-Encoding, {coding}.")
    return decompressed


def _window(body: bytes, coding: str) -> int:
    """Return how zlib reads a body. Some clients send `deflate` without the header that belongs to it."""
    if coding != "deflate":
        return _WITH_GZIP_HEADER
    is_headed = (
        len(body) > 1 and body[0] % 16 == _ZLIB_METHOD and (body[0] * 256 + body[1]) % _ZLIB_CHECK == 0
    )
    return zlib.MAX_WBITS if is_headed else _WITHOUT_HEADER
