"""Image files for tests, made here."""

from __future__ import annotations

import io
import struct
import zlib
from base64 import b64encode
from functools import cache
from random import Random

from PIL import Image as Pillow


@cache
def picture(kind: str = "PNG", size: tuple[int, int] = (40, 30), seed: int = 0, mode: str = "RGB") -> bytes:
    """A small file of a format, with something in it."""
    noise = Random(seed).randbytes(size[0] * size[1])
    image = Pillow.frombytes("L", size, noise).convert(mode)
    return saved(image, kind)


def saved(image: Pillow.Image, kind: str, **how: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{b64encode(data).decode()}"


def empty_png(width: int, height: int, pixels: bytes = b"") -> bytes:
    """A PNG that says how large it is and holds these compressed pixels, with right checksums."""
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(pixels)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        len(data).to_bytes(4) + name + data + zlib.crc32(name + data).to_bytes(4) for name, data in chunks
    )
