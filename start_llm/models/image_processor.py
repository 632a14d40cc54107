"""Turns the images of requests into tokens, and into the arrays that a vision tower reads.

Everything here may be called from any thread, and none of it touches MLX: HTTP threads decode.
"""

import hashlib
import io
import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from PIL import Image as Pillow
from PIL import ImageOps

from start_llm.core.client_presence import check_client
from start_llm.core.errors import InvalidRequest
from start_llm.core.images import IMAGE_DAMAGE, Image, ImageRun, image_tokens
from start_llm.core.recently_used import RecentlyUsed

type Inputs = Mapping[str, np.ndarray[Any, Any]]
"""The arguments of a vision tower for one image."""
type Size = tuple[int, int]
"""Width and height in pixels."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "HEIF")
"""Pillow opens 43 formats; these are images that people send. HEIF is there if a plugin has registered it."""
DEFAULT_MAX_TOKENS = 4096
_MOST_INPUT_BYTES = 256 * 2**20
"""Images as the tower takes them: one of 4,096 tokens takes up to 77 MiB, and is processed for hundreds of
milliseconds."""
_MOST_SIZES = 256
_MOST_NAMING_TOKENS = 2**18
"""Tokens of images that are kept, since naming an image of 4,096 takes 2 ms: about 10 MiB."""
_UNREADABLE = (*IMAGE_DAMAGE, MemoryError, Pillow.DecompressionBombError)
"""What Pillow raises for files that are broken, of no known format, or much too large."""
_BITS_PER_SAMPLE = 258
"""A tag of TIFF."""
_SHRINK = 0.98
"""Factor on a size that should just fit, because towers round sizes up to whole patches."""
_MOST_ATTEMPTS = 8


class Preprocessed(NamedTuple):
    """What a model's image processor makes of one image.

    Attributes:
        network_ids: the ids of the run; see `ImageRun`.
        grid: see `ImageRun`.
    """

    inputs: Inputs
    network_ids: tuple[int, ...]
    grid: tuple[int, int, int] | None


class Preprocess(Protocol):
    """A model's own processing of one RGB image. Raises ValueError if its form is impossible."""

    def __call__(self, image: Pillow.Image) -> Preprocessed: ...


@dataclass(frozen=True, slots=True)
class ImageMarks:
    """The texts of an image in a prompt. See `ImageProcessor`."""

    placeholder: str
    before: str = ""
    after: str = ""


@dataclass(frozen=True, slots=True)
class _Shape:
    """What follows from an image's size alone.

    Attributes:
        fitted: the size to which it is shrunk first.
    """

    fitted: Size
    network_ids: tuple[int, ...]
    grid: tuple[int, int, int] | None


class ImageProcessor:
    """Expands images to runs of tokens. Safe to use from any thread.

    An image with too many tokens is shrunk until it has no more than `max_tokens`, unless all images of the
    model have the same number. How many an image has depends on its size alone, so an image of a known
    size is expanded without a look at its pixels.

    Args:
        settings: everything that decides what `preprocess` makes of an image, as text.

    Attributes:
        placeholder: what the chat template writes for an image.
        before, after: texts around the run, which replace the placeholder with it.
        max_tokens: most tokens of one image. Set it before the first image is expanded.
    """

    def __init__(
        self,
        preprocess: Preprocess,
        marks: ImageMarks,
        *,
        settings: str = "",
        max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> None:
        self.preprocess = preprocess
        self._settings = settings
        self.placeholder, self.before, self.after = marks.placeholder, marks.before, marks.after
        self.max_tokens = max_tokens
        self._shapes = RecentlyUsed[Size, _Shape](_MOST_SIZES, lambda _: 1)
        self._tokens = RecentlyUsed[bytes, tuple[int, ...]](_MOST_NAMING_TOKENS, len)
        self._inputs = RecentlyUsed[bytes, Inputs](_MOST_INPUT_BYTES, _nbytes)

    @property
    def input_bytes(self) -> int:
        """Memory of the images that are kept as the tower takes them."""
        return self._inputs.size

    def expand(self, image: Image) -> ImageRun:
        """Return the tokens of an image.

        Raises:
            InvalidRequest: the image cannot be decoded, or this model cannot read one of its form.
        """
        shape = self._shapes.get((image.width, image.height)) or self._shape_of(image)
        return ImageRun(
            tokens=self._tokens_of(image, shape),
            network_ids=shape.network_ids,
            grid=shape.grid,
            inputs=partial(self._inputs_of, image, shape),
        )

    def _tokens_of(self, image: Image, shape: _Shape) -> tuple[int, ...]:
        """Return tokens that name everything that decides what the tower sees.

        A limit is part of that where it acts, by the size to which it shrinks the image: with another limit
        all other images keep their tokens, and so what was computed of them.
        """
        known = self._tokens.get(image.digest)
        if known is None:
            name = hashlib.blake2b(image.digest, digest_size=32)
            name.update(f"{shape.fitted} {self._settings}".encode())
            with _file(image.data) as opened:
                if _is_deep(opened):
                    name.update(b"16 bits")  # else it is the white image that such files were once taken for
            known = image_tokens(name.digest(), len(shape.network_ids))
            self._tokens.put(image.digest, known)
        return known

    def _shape_of(self, image: Image) -> _Shape:
        """Process an image of an unknown size: once, or until it has few enough tokens."""
        decoded = _decoded(image)
        size, done = decoded.size, self._processed(decoded)
        whole = done
        for attempt in range(_MOST_ATTEMPTS):
            count = len(done.network_ids)
            if count <= self.max_tokens:
                break
            size = _scaled(size, math.sqrt(self.max_tokens / count) * _SHRINK**attempt)
            done = self._processed(_resized(decoded, size))
        if len(done.network_ids) >= len(whole.network_ids):
            size, done = decoded.size, whole  # it is small enough, or its number does not depend on the size
        shape = _Shape(size, done.network_ids, done.grid)
        self._shapes.put((image.width, image.height), shape)
        self._inputs.put(image.digest, done.inputs)
        return shape

    def _inputs_of(self, image: Image, shape: _Shape) -> Inputs:
        known = self._inputs.get(image.digest)
        if known is not None:
            return known
        inputs = self._processed(_resized(_decoded(image), shape.fitted)).inputs
        self._inputs.put(image.digest, inputs)
        return inputs

    def _processed(self, image: Pillow.Image) -> Preprocessed:
        try:
            return self.preprocess(image)
        except ValueError as error:
            raise InvalidRequest(
                f"This model cannot read an image of {image.width} by {image.height} pixels: {error}"
            ) from error


def _decoded(image: Image) -> Pillow.Image:
    """Decode the first frame, turned as its EXIF data say, over white where it is transparent, as RGB."""
    check_client()
    decoded = _opened(image.data)
    if decoded.size != (image.width, image.height):
        raise InvalidRequest("An image is not of the size that its header states.")
    return decoded


@contextmanager
def _file(data: bytes) -> Generator[Pillow.Image]:
    """Open a file, and refuse what is wrong with it."""
    Pillow.init()  # registers the formats; a second call does nothing
    known = [name for name in FORMATS if name in Pillow.OPEN]
    try:
        with Pillow.open(io.BytesIO(data), formats=known) as opened:
            yield opened
    except _UNREADABLE as error:
        raise InvalidRequest(f"An image cannot be decoded: {error}") from error


def _opened(data: bytes) -> Pillow.Image:
    with _file(data) as opened:
        opened.load()
        opened.getexif()  # keeps it. What is left in `info` would be written anew, which may be impossible
        for name in ("exif", "Raw profile type exif"):
            opened.info.pop(name, None)
        turned = ImageOps.exif_transpose(opened)
        if _is_deep(opened):
            return _upper_bits(turned, getattr(opened, "tag_v2", {}).get(_BITS_PER_SAMPLE, (16,))[0])
        if turned.has_transparency_data:
            over = Pillow.new("RGBA", turned.size, "white")
            turned = Pillow.alpha_composite(over, turned.convert("RGBA"))
        return turned.convert("RGB")


def _is_deep(image: Pillow.Image) -> bool:
    """Return True for grey of 12 or 16 bits. Pillow's conversion makes all but the darkest white."""
    return image.mode.startswith("I;16")


def _upper_bits(image: Pillow.Image, bits: int) -> Pillow.Image:
    """Return a deep grey image with the upper eight of its bits, as RGB."""
    values = np.asarray(image)
    grey = (values >> (bits - 8)).astype(np.uint8)
    grey[values == image.info.get("transparency", -1)] = 255
    return Pillow.fromarray(grey).convert("RGB")


def _resized(image: Pillow.Image, size: Size) -> Pillow.Image:
    return image if image.size == size else image.resize(size, Pillow.Resampling.LANCZOS)


def _scaled(size: Size, factor: float) -> Size:
    width, height = size
    return max(int(width * factor), 1), max(int(height * factor), 1)


def _nbytes(inputs: Inputs) -> int:
    return sum(array.nbytes for array in inputs.values())
