"""Bodies with images: of every format, in every form and place, many of them damaged or no images at all."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

from tests.fuzz.bodies import CHAT, MESSAGES, RESPONSES, Body
from tests.images.files import data_url, empty_png, picture

SEEING = (CHAT, MESSAGES, RESPONSES)
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
_FOREIGN = (
    b"%PDF-1.7\n",
    b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    b"\x00\x00\x00\x18ftypheic" + bytes(40),
    b"GIF89a",
    b"\xff\xd8\xff",
    b"RIFF\x00\x00\x00\x00WEBP",
    b"BM" + bytes(60),
    b"II*\x00\x08\x00\x00\x00" + bytes(8),
    b"x" * 3000,
)
_URLS = (
    "",
    "data:",
    "data:image/png,",
    "data:image/png;base64,",
    "data:;base64,####",
    "DATA:image/png;BASE64,iVBORw0KGgo=",
    "http://127.0.0.1:1/x.png",
    "https://user:secret@example.com/",
    "http://2130706433/",
    "http://[::ffff:127.0.0.1]/",
    "file:///etc/passwd",
    "ftp://example.com/x.png",
    "/etc/passwd",
    "x" * 9000,
)


@cache
def _file(kind: str, seed: int) -> bytes:
    return picture(kind, (8 + 5 * seed, 40 - 5 * seed), seed)


def _sound(random: Random) -> bytes:
    return _file(random.choice(_FORMATS), random.randrange(4))


def _cut(random: Random) -> bytes:
    data = _sound(random)
    return data[: random.randrange(len(data))]


def _damaged(random: Random) -> bytes:
    data = bytearray(_sound(random))
    for _ in range(random.choice((1, 4, 40))):
        data[random.randrange(len(data))] = random.randrange(256)
    return bytes(data)


def _huge(random: Random) -> bytes:
    sides = (0, 1, 7, 9999, 10_000, 100_000, 2**31 - 1)
    return empty_png(random.choice(sides), random.choice(sides), bytes(random.choice((0, 1000))))


_FILES: tuple[Callable[[Random], bytes], ...] = (
    _sound,
    _sound,
    _cut,
    _damaged,
    _damaged,
    _huge,
    lambda random: random.choice(_FOREIGN),
    lambda random: random.randbytes(random.choice((1, 50, 3000))),
)


def url(random: Random) -> str:
    """A data URL that holds something, or an address."""
    if random.random() < 0.15:
        return random.choice(_URLS)
    made = data_url(
        random.choice(_FILES)(random), random.choice(("image/png", "image/jpeg", "text/plain", ""))
    )
    if random.random() < 0.05:
        at = random.randrange(len(made))
        made = made[:at] + random.choice("\n =-_é\x00") + made[at:]
    return made


def part(protocol: str, url: str) -> Body:
    """An image as a protocol has it."""
    if protocol == CHAT:
        return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}
    if protocol == RESPONSES:
        return {"type": "input_image", "image_url": url}
    if url.startswith("data:image/png;base64,"):
        data = url.partition(",")[2]
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    return {"type": "image", "source": {"type": "url", "url": url}}


def with_pictures(body: Body, protocol: str, random: Random, *, sound: bool) -> Body:
    """The body with images in some of its messages.

    Args:
        sound: all of them can be shown.
    """
    field = "input" if protocol == RESPONSES else "messages"
    items: list[Any] = body[field] if isinstance(body.get(field), list) else []
    for item in [entry for entry in items if isinstance(entry, dict)][-3:]:
        name = "output" if item.get("type") == "function_call_output" else "content"
        if item.get("role") not in ("user", "system", "tool") and name == "content":
            continue
        parts = _parts(item.get(name), protocol)
        for _ in range(random.choice((0, 1, 1, 2))):
            source = data_url(_sound(random)) if sound else url(random)
            parts.insert(random.randint(0, len(parts)), part(protocol, source))
        item[name] = parts
    return body


def _parts(content: Any, protocol: str) -> list[Any]:
    if isinstance(content, list):
        return content
    kind = "input_text" if protocol == RESPONSES else "text"
    return [{"type": kind, "text": content}] if isinstance(content, str) and content else []
