"""What an image is, is known before it is decoded; what cannot be decoded is refused at once."""

from __future__ import annotations

import resource
import time
from functools import cache
from random import Random

import pytest
from PIL import Image as Pillow
from PIL.ImageFile import ImageFile, _Tile

from start_llm.config.prompt_variables import ImageSettings
from start_llm.core.client_presence import client_watched
from start_llm.core.errors import ClientGone
from start_llm.images.checking import ImageChecker, readable_formats
from start_llm.images.problems import ImageProblem
from tests.images.files import empty_png, picture, saved

pytestmark = pytest.mark.filterwarnings("ignore:::PIL")

CHECKER = ImageChecker(ImageSettings())
READ = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
FOREIGN = {
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\n%%EndComments\nshowpage\n",
    "SVG": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><script>1</script></svg>',
    "PDF": b"%PDF-1.7\n1 0 obj\n<< /Type /Catalog >>\nendobj\n",
    "HTML": b"<!doctype html><img src=x>",
    "text": b"no image at all",
    "zeros": bytes(5000),
    "zip": b"PK\x03\x04" + bytes(64),
    "MP4": b"\x00\x00\x00\x20ftypisom" + bytes(40),
}
WRITABLE = """
BLP BUFR DDS DIB EPS GRIB HDF5 ICNS ICO IM JPEG2000 MSP PALM PCX PDF PPM QOI SGI SPIDER TGA WMF XBM
""".split()
"""What Pillow may write beside the formats that are read."""


def problem(data: bytes, checker: ImageChecker = CHECKER) -> ImageProblem:
    began = time.perf_counter()
    with pytest.raises(ImageProblem) as refused:
        checker.check(data)
    # A busy machine takes its time; `benchmarks serving --only fairness` has the figures.
    assert time.perf_counter() - began < 1
    return refused.value


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "1"])
@pytest.mark.parametrize("kind", READ)
def test_the_formats_that_clients_send_are_read(kind: str, mode: str):
    if kind == "JPEG" and mode in ("P", "RGBA"):
        mode = "CMYK"
    data = picture(kind, mode=mode)
    image = CHECKER.check(data)
    assert (image.data, image.width, image.height) == (data, 40, 30)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_numbers_of_which_nobody_knows_which_is_white_are_refused(mode: str):
    refusal = problem(picture("TIFF", mode=mode))
    assert refusal.code == "invalid_image"
    assert "send 8 or 16 bits for each" in refusal.predicate


def test_sixteen_bits_are_read():
    assert CHECKER.check(picture("PNG", mode="I;16")).width == 40


def test_nothing_is_decoded_for_a_client_that_has_left():
    checker, data = ImageChecker(ImageSettings()), picture(seed=77)
    with client_watched(lambda: True), pytest.raises(ClientGone):
        checker.check(data)
    with client_watched(lambda: False):
        assert checker.check(data).width == 40


@cache
def foreign() -> list[tuple[str, bytes]]:
    Pillow.init()
    samples = list(FOREIGN.items())
    for kind in WRITABLE:
        for mode in ("RGB", "L", "1", "P", "F"):
            try:
                image = Pillow.frombytes("L", (16, 16), Random(1).randbytes(256)).convert(mode)
                samples.append((kind, saved(image, kind)))
                break
            except (OSError, ValueError, KeyError):
                continue  # this format is not written here, or not in this mode
    return samples


@pytest.mark.parametrize(
    ("kind", "data"), foreign(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_other_kinds_of_files_are_refused_although_pillow_opens_them(kind: str, data: bytes):
    refusal = problem(data)
    assert refusal.code == "invalid_image_format"
    assert "png, jpeg, webp, gif, bmp, tiff, avif" in refusal.predicate


def test_enough_foreign_kinds_are_tried():
    assert len(foreign()) >= 20


def test_heic_needs_a_package_and_says_so():
    data = b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic" + bytes(100)
    blind = ImageChecker(ImageSettings(), formats=READ)
    refusal = problem(data, blind)
    assert "pillow-heif" in refusal.predicate
    assert "HEIC" in refusal.message


def test_heic_is_read_by_the_package():
    """By a plugin that stands for it: what is tried is that its format is among those that are read."""

    class Heif(ImageFile):
        format = "HEIF"

        def _open(self) -> None:
            self._mode, self._size = "RGB", (12, 9)
            self.tile = [_Tile("raw", (0, 0, 12, 9), 12, ("RGB", 0, 1))]

    Pillow.register_open("HEIF", Heif, lambda prefix: prefix[4:12] == b"ftypheic")
    try:
        seeing = ImageChecker(ImageSettings(), formats=(*READ, "HEIF"))
        image = seeing.check(b"\x00\x00\x00\x18ftypheic" + bytes(400))
        assert (image.width, image.height) == (12, 9)
    finally:
        del Pillow.OPEN["HEIF"]
        Pillow.ID.remove("HEIF")


def test_what_is_read_here_is_what_pillow_can_read_here():
    assert set(readable_formats()) - {"HEIF"} == set(READ)


# --------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("kind", READ)
def test_a_truncated_file_is_found(kind: str):
    data = picture(kind, (200, 160))
    for share in (0.3, 0.6, 0.95):
        refusal = problem(data[: round(share * len(data))])
        assert refusal.code in ("invalid_image", "invalid_image_format")


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", READ)
def test_damage_is_a_problem_of_the_image_and_nothing_else(kind: str):
    """Some damaged files can be read all the same; none raises anything else."""
    data, random = picture(kind, (60, 50), mode="L"), Random(7)
    for _ in range(150):
        damaged = bytearray(data)
        for _ in range(random.choice((1, 3, 20))):
            damaged[random.randrange(len(damaged))] = random.randrange(256)
        try:
            CHECKER.check(bytes(damaged))
        except ImageProblem as problem:
            assert problem.code


def test_pixels_that_are_not_there_are_missed():
    assert problem(empty_png(100, 100)).code == "invalid_image"


def test_nothing_is_no_image():
    assert problem(b"").code == "empty_image_file"


# --------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("size", "named"),
    [
        ((10_000, 10_000), "10000x10000 pixels"),
        ((1, 100_000), "1x100000 pixels"),
        ((100_000, 1), "100000x1 pixels"),
        ((2**31 - 1, 2**31 - 1), "pixels"),
    ],
)
def test_bombs_are_refused_by_their_headers_and_take_no_memory(size: tuple[int, int], named: str):
    bomb = empty_png(*size, pixels=bytes(2**20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refusal = problem(bomb)
    assert refusal.code == "image_too_large"
    assert named in refusal.message
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


@pytest.mark.thorough
def test_a_bomb_of_another_format_is_one_too():
    for kind in ("BMP", "TIFF", "GIF"):
        image = Pillow.new("1", (8000, 8000))
        assert problem(saved(image, kind)).code == "image_too_large"


def test_the_limits_are_the_users():
    checker = ImageChecker(ImageSettings(max_bytes=5000, max_pixels=1000))
    assert problem(picture("BMP", size=(60, 50)), checker).code == "image_file_too_large"
    refusal = problem(picture(), checker)
    assert refusal.message == "image dimensions exceed max allowed size: 40x30 pixels > 1000 pixels"
    assert "IMAGE_MAX_PIXELS" in refusal.predicate
    assert checker.check(picture(size=(20, 20))).width == 20


@pytest.mark.thorough
def test_a_photo_of_twelve_megapixels_is_read():
    data = saved(Pillow.effect_noise((4000, 3000), 60).convert("RGB"), "JPEG")
    assert CHECKER.check(data).width == 4000


# -------------------------------------------------------------------------------------------- other things


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_the_size_is_that_of_the_turned_image(kind: str):
    exif = Pillow.Exif()
    exif[0x0112] = 6
    image = Pillow.frombytes("L", (40, 30), Random(2).randbytes(1200)).convert("RGB")
    data = saved(image, kind, exif=exif)
    for _ in range(2):
        turned = CHECKER.check(data)
        assert (turned.width, turned.height) == (30, 40)


def test_of_several_frames_the_first_counts():
    frames = [Pillow.new("RGB", (40, 30), color) for color in ("red", "green", "blue")]
    for kind in ("GIF", "WEBP", "PNG", "TIFF", "AVIF"):
        data = saved(frames[0], kind, save_all=True, append_images=frames[1:])
        assert CHECKER.check(data).width == 40


@pytest.mark.thorough
def test_an_image_that_was_read_once_is_not_decoded_again():
    """Conversations send their images in every turn."""
    checker = ImageChecker(ImageSettings())
    data = picture("PNG", (1500, 1500), seed=3)
    began = time.perf_counter()
    first = checker.check(data)
    between = time.perf_counter()
    assert checker.check(data) == first
    assert time.perf_counter() - between < (between - began) / 2
