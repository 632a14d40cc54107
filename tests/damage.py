"""Ways to damage a file: one byte, many, holes, pieces that are missing, twice there or of something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

_FIRST = 8192
_SECTOR = 512
_TEXTS = (b"\xff\xfe\x80", b"null", b"-1", b"1e999", b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b"\0\0", b'"')


class Damage(NamedTuple):
    """What was done to a file, and what it holds since."""

    description: str
    content: bytes


def damages(whole: bytes, count: int, seed: int) -> Iterator[Damage]:
    """Yield so many damaged copies of a file.

    Half of them have one other byte, in equal steps over the first two pages; the others anything, anywhere.
    """
    random = Random(seed)
    first = min(len(whole), _FIRST)
    steps = min(count // 2, first)
    for number in range(steps):
        yield _other_byte(whole, number * first // steps, random)
    for _ in range(count - steps):
        yield random.choice(_WAYS)(whole, random)


def _other_byte(whole: bytes, place: int, random: Random) -> Damage:
    value = whole[place] ^ random.randrange(1, 256)
    return Damage(f"byte {place} is {value}", whole[:place] + bytes([value]) + whole[place + 1 :])


def _noise(whole: bytes, random: Random) -> Damage:
    """Forty-eight random bytes, which was seen to end every start."""
    place = random.randrange(min(len(whole), _FIRST))
    return Damage(f"noise at {place}", whole[:place] + random.randbytes(48) + whole[place + 48 :])


def _scattered(whole: bytes, random: Random) -> Damage:
    content = bytearray(whole)
    count = random.randrange(1, 65)
    for _ in range(count):
        content[random.randrange(len(whole))] = random.randrange(256)
    return Damage(f"{count} bytes", bytes(content))


def _cut(whole: bytes, random: Random) -> Damage:
    end = random.randrange(len(whole))
    return Damage(f"cut at {end}", whole[:end])


def _hole(whole: bytes, random: Random) -> Damage:
    begin = random.randrange(len(whole)) // _SECTOR * _SECTOR
    end = min(begin + _SECTOR * random.randrange(1, 9), len(whole))
    return Damage(f"zeros from {begin} to {end}", whole[:begin] + bytes(end - begin) + whole[end:])


def _missing(whole: bytes, random: Random) -> Damage:
    begin, end = sorted(random.randrange(len(whole) + 1) for _ in range(2))
    return Damage(f"without {begin} to {end}", whole[:begin] + whole[end:])


def _twice(whole: bytes, random: Random) -> Damage:
    begin, end = sorted(random.randrange(len(whole) + 1) for _ in range(2))
    return Damage(f"{begin} to {end} twice", whole[:end] + whole[begin:])


def _text(whole: bytes, random: Random) -> Damage:
    place, text = random.randrange(len(whole)), random.choice(_TEXTS)
    behind = place + random.choice((0, 1, len(text)))
    return Damage(f"{text[:8]!r} at {place}", whole[:place] + text + whole[behind:])


def _of_something_else(whole: bytes, random: Random) -> Damage:
    content = random.choice((b"", b"\0", random.randbytes(len(whole)), bytes(len(whole)), *_TEXTS))
    return Damage(f"something else: {content[:8]!r}", content)


_WAYS: tuple[Callable[[bytes, Random], Damage], ...] = (
    _noise,
    _noise,
    _scattered,
    _cut,
    _hole,
    _missing,
    _twice,
    _text,
    _of_something_else,
)
