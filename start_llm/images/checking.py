"""Checks what an image is, before anything is decoded, and then that it can be decoded.

Pillow opens 43 kinds of files, some with programs or with parsers that nobody tests. Only the formats that
clients send are tried.
"""

import io
import logging
import threading
import warnings
from dataclasses import replace
from importlib.util import find_spec

from PIL import Image as Pillow
from PIL import UnidentifiedImageError
from PIL.AvifImagePlugin import AvifImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from start_llm.core.client_presence import held_in_turn
from start_llm.core.images import IMAGE_DAMAGE, Image
from start_llm.core.limits import ImageLimits
from start_llm.core.recently_used import RecentlyUsed
from start_llm.images.problems import (
    could_not_process,
    has_another_format,
    has_no_decoder,
    has_no_scale,
    has_too_many_bytes,
    has_too_many_pixels,
    is_empty,
    is_too_narrow,
)

_FILES = (
    PngImageFile,
    JpegImageFile,
    WebPImageFile,
    GifImageFile,
    BmpImageFile,
    TiffImageFile,
    AvifImageFile,
)
_FORMATS = tuple(str(file.format) for file in _FILES)
_HEIF = "HEIF"
_HEIF_PACKAGE = "pillow-heif"
_HEIF_BRANDS = frozenset({b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"})
MAX_RATIO = 200
"""How many times as long as the other a side may be: image processors refuse more."""
_ORIENTATION = 0x0112
_SIDEWAYS = range(5, 9)
_MAX_KNOWN = 4096
_DECODED_AT_ONCE = 2
"""Images of 50 megapixels take 200 MB each while they are decoded."""
_SCALELESS = ("I", "F")
"""Modes of 32-bit numbers, also of signed ones of 16 bits: files do not say which number is white."""

# The check here is stricter, and names the field.
Pillow.MAX_IMAGE_PIXELS = None
# Python keeps each text of a warning, and files of clients can make up any number of them.
warnings.filterwarnings("ignore", module=r"PIL\.")
# Nor do they print anything in the terminal.
_log = logging.getLogger("PIL")
_log.addHandler(logging.NullHandler())
_log.propagate = False


def readable_formats() -> tuple[str, ...]:
    """Return the formats that can be decoded here: HEIC too, if pillow-heif is installed."""
    if find_spec("pillow_heif") is None:
        return _FORMATS
    import pillow_heif  # noqa: PLC0415  # pyright: ignore[reportMissingImports] - optional

    pillow_heif.register_heif_opener()  # pyright: ignore[reportUnknownMemberType]
    return (*_FORMATS, _HEIF)


class ImageChecker:
    """Checks images. An image that was decoded once is known from then on. Safe to use from any thread."""

    def __init__(self, limits: ImageLimits, formats: tuple[str, ...] | None = None) -> None:
        self.limits = limits
        self._formats = readable_formats() if formats is None else formats
        self._decoding = threading.BoundedSemaphore(_DECODED_AT_ONCE)
        self._sizes = RecentlyUsed[bytes, tuple[int, int]](_MAX_KNOWN, lambda _: 1)

    def check(self, data: bytes) -> Image:
        """Return the image in a file. Its content decides what it is, not what the client calls it.

        Raises:
            ImageProblem: it is too large, of another format, or damaged.
            ClientGone: the client has left.
        """
        if not data:
            raise is_empty()
        if len(data) > self.limits.max_bytes:
            raise has_too_many_bytes(len(data), self.limits.max_bytes)
        opened = self._open(data)
        width, height = opened.size
        self._require_size(width, height)
        if opened.mode in _SCALELESS:
            raise has_no_scale()
        image = Image(data, width, height)
        size = self._sizes.get(image.digest)
        if size is None:
            with held_in_turn(self._decoding):
                size = self._decoded_size(data)
            self._sizes.put(image.digest, size)
        return image if size == (width, height) else replace(image, width=size[0], height=size[1])

    def _open(self, data: bytes) -> Pillow.Image:
        """Read the header."""
        try:
            return Pillow.open(io.BytesIO(data), formats=self._formats)
        except UnidentifiedImageError:
            if data[4:8] == b"ftyp" and data[8:12] in _HEIF_BRANDS and _HEIF not in self._formats:
                raise has_no_decoder("HEIC", _HEIF_PACKAGE) from None
            raise has_another_format(", ".join(name.lower() for name in self._formats)) from None
        except IMAGE_DAMAGE as error:
            raise could_not_process(str(error) or type(error).__name__) from error

    def _require_size(self, width: int, height: int) -> None:
        if width * height > self.limits.max_pixels:
            raise has_too_many_pixels(width, height, self.limits.max_pixels)
        if max(width, height) > MAX_RATIO * min(width, height):
            raise is_too_narrow(width, height, MAX_RATIO)

    def _decoded_size(self, data: bytes) -> tuple[int, int]:
        """Decode the first frame, and return its size as a viewer shows it.

        Checksums of PNG find damage ten times faster than decoding. JPEG is decoded at an eighth of its size,
        which reads all of the file.
        """
        try:
            image = self._open(data)
            if image.format == "PNG":
                image.verify()
                image = self._open(data)
            width, height = image.size
            image.draft(None, (1, 1))
            image.load()
            is_sideways = image.getexif().get(_ORIENTATION) in _SIDEWAYS
        except IMAGE_DAMAGE as error:
            raise could_not_process(str(error) or type(error).__name__) from error
        return (height, width) if is_sideways else (width, height)
