"""Images in requests, in prompts and in tokens.

In a message's text an image is one word that no client can write, because it is random in each process. In a
prompt it is a run of tokens. Each of them is an integer of at least 2**31 that names the image, so equal
tokens mean equal pixels, and whatever compares or hashes tokens needs no special case for images.
"""

import hashlib
import re
import secrets
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

FIRST_IMAGE_TOKEN = 2**31
HIDDEN_IMAGE = "[image]"
"""Stands for an image in texts for people: traces, explanations, errors."""
IMAGE_DAMAGE = (
    *(OSError, SyntaxError, ValueError, LookupError, TypeError, ArithmeticError, RuntimeError, EOFError),
    *(struct.error, zlib.error),
)
"""What Pillow raises for damaged files."""
_DIGEST_BYTES = 32
_WORD = f"image{secrets.token_hex(16)}x"
_ANY_WORD = re.compile(rf"{_WORD}[0-9a-f]{{{2 * _DIGEST_BYTES}}}")


@dataclass(frozen=True, slots=True)
class Image:
    """An image of a request, checked but not decoded.

    Attributes:
        data: the file as the client sent it.
        width, height: in pixels, as a viewer shows it.
    """

    data: bytes = field(repr=False)
    width: int
    height: int
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.blake2b(self.data, digest_size=_DIGEST_BYTES).digest()
        object.__setattr__(self, "digest", digest)

    @property
    def word(self) -> str:
        """The word that stands for the image in the text of messages."""
        return _WORD + self.digest.hex()


class PlacedImage(NamedTuple):
    """The place of an image in a text: characters of the text without images in front of it."""

    place: int
    digest: bytes


def image_words(text: str) -> Iterator[re.Match[str]]:
    """Find the words of images in a text."""
    return _ANY_WORD.finditer(text)


def has_image(text: str) -> bool:
    return _WORD in text


def hide_images(text: str) -> str:
    """Return a text that others may see: without the words, which only this process may know."""
    return _ANY_WORD.sub(HIDDEN_IMAGE, text)


def digest_of_word(word: str) -> bytes:
    return bytes.fromhex(word.removeprefix(_WORD))


def without_images(text: str) -> tuple[str, tuple[PlacedImage, ...]]:
    """Return a text without its images, and the places where they stood."""
    kept, places, after, length = list[str](), list[PlacedImage](), 0, 0
    for word in image_words(text):
        kept.append(text[after : word.start()])
        length += word.start() - after
        places.append(PlacedImage(length, digest_of_word(word.group())))
        after = word.end()
    return "".join([*kept, text[after:]]), tuple(places)


@dataclass(frozen=True, slots=True, eq=False)
class ImageRun:
    """The tokens of one image in a prompt.

    Attributes:
        tokens: name the image; each is at least 2**31.
        network_ids: the ids that the network reads in their place, one for each.
        grid: time, rows and columns of positions, for networks whose positions have three axes; else None.
        inputs: returns the arguments of the vision tower, NumPy arrays by name. It decodes the image, which
            takes up to seconds; it may be called from any thread, and more than once.
    """

    tokens: tuple[int, ...]
    network_ids: tuple[int, ...]
    grid: tuple[int, int, int] | None
    inputs: Callable[[], Mapping[str, Any]]

    def __len__(self) -> int:
        return len(self.tokens)


def image_tokens(digest: bytes, count: int) -> tuple[int, ...]:
    """Return `count` tokens that name an image by its digest, and the place of each in its run."""
    tokens: list[int] = []
    for block in range(-(-count // 16)):
        names = hashlib.blake2b(digest + block.to_bytes(4, "little"), digest_size=64).digest()
        tokens += [int.from_bytes(names[at : at + 4], "little") | FIRST_IMAGE_TOKEN for at in range(0, 64, 4)]
    return tuple(tokens[:count])


class ImageSpan(NamedTuple):
    """The place of an image's run in a prompt: tokens `start` to `end`."""

    start: int
    end: int
    run: ImageRun


def image_spans(ids: Sequence[int], runs: Mapping[int, ImageRun]) -> list[ImageSpan]:
    """Find the images in a prompt, in order.

    Args:
        runs: by the first token of each run.

    Raises:
        KeyError: an image has no run.
    """
    spans, at = list[ImageSpan](), 0
    while at < len(ids):
        if ids[at] < FIRST_IMAGE_TOKEN:
            at += 1
            continue
        run = runs[ids[at]]
        spans.append(ImageSpan(at, at + len(run), run))
        at += len(run)
    return spans
