"""Compressed bodies, and what pretends to be one."""

import gzip
import zlib

import pytest
from backports import zstd

from start_llm.access.content_coding import content_coding, decoded
from start_llm.core.errors import BodyTooLarge, InvalidRequest, UnsupportedMediaType

TEXT = b'{"prompt": "Hi"}' * 50
MOST = 10_000


def raw_deflate(data: bytes) -> bytes:
    deflating = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return deflating.compress(data) + deflating.flush()


CODED = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "GZIP ": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstd.compress,
    "identity": bytes,
    "": bytes,
}


@pytest.mark.parametrize("name", CODED)
def test_a_body_is_what_was_coded(name: str):
    for text in (TEXT, b"x"):
        assert decoded(CODED[name](text), content_coding(name), MOST) == text


def test_deflate_is_known_without_its_header_too():
    assert decoded(raw_deflate(TEXT), "deflate", MOST) == TEXT


@pytest.mark.parametrize("name", ["br", "dcz", "gzip, gzip", "gzip;q=1"])
def test_an_unknown_coding_is_refused_with_those_that_are_known(name: str):
    with pytest.raises(UnsupportedMediaType, match="gzip, deflate, zstd or identity"):
        content_coding(name)


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd"])
def test_a_body_that_inflates_beyond_the_limit_is_refused(coding: str):
    bomb = CODED[coding](b" " * 10**7)
    assert len(bomb) < MOST
    with pytest.raises(BodyTooLarge, match="10000 bytes"):
        decoded(bomb, coding, MOST)
    assert len(decoded(CODED[coding](b" " * MOST), coding, MOST)) == MOST


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"",
        lambda _: TEXT,
        lambda whole: whole[:-1],
        lambda whole: whole + b"x",
        lambda whole: whole * 2,
    ],
    ids=["nothing", "not coded", "cut", "more", "twice"],
)
def test_a_body_that_is_not_one_whole_stream_is_refused(coding: str, damage):
    with pytest.raises(InvalidRequest, match=coding):
        decoded(damage(CODED[coding](TEXT)), coding, MOST)


def test_a_frame_that_wants_more_memory_than_http_allows_is_refused():
    """Its window is 128 MiB, whatever its text has."""
    wide = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27})
    with pytest.raises(InvalidRequest, match="zstd"):
        decoded(wide.compress(TEXT) + wide.flush(), "zstd", MOST)
