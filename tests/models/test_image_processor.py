"""An image becomes tokens, whatever its file is like, and its pixels are looked at no more than needed."""

from __future__ import annotations

import hashlib
import io
import struct
from threading import Thread
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from start_llm.core.errors import InvalidRequest
from start_llm.core.images import FIRST_IMAGE_TOKEN, Image, image_tokens
from start_llm.core.limits import ImageLimits
from start_llm.images.checking import ImageChecker
from start_llm.models.image_processor import ImageMarks, ImageProcessor, Preprocessed

SIDE = 10
"""Pixels of a token's side."""


class Patches:
    """A processing that gives a token for each 10 by 10 pixels, and remembers what it was given."""

    def __init__(self) -> None:
        self.seen: list[Pillow.Image] = []

    def __call__(self, image: Pillow.Image) -> Preprocessed:
        self.seen.append(image)
        if max(image.size) > 100 * min(image.size):
            raise ValueError("it is too narrow")
        columns, rows = (-(-side // SIDE) for side in image.size)
        return Preprocessed({"pixel_values": np.asarray(image)}, (7,) * (rows * columns), (1, rows, columns))


def processor(patches: Any = None, **more: Any) -> ImageProcessor:
    return ImageProcessor(patches or Patches(), ImageMarks("<image>", "<begin>", "<end>"), **more)


def encoded(shown: Pillow.Image, form: str = "PNG", **options: Any) -> Image:
    data = io.BytesIO()
    shown.save(data, form, **options)
    return Image(data.getvalue(), shown.width, shown.height)


def noise(width: int = 60, height: int = 40, seed: int = 0) -> Pillow.Image:
    return Pillow.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def pixels(image: Image) -> np.ndarray:
    return processor().expand(image).inputs()["pixel_values"]


def test_an_image_has_the_tokens_that_its_processing_gives():
    run = processor().expand(encoded(noise()))
    assert (len(run), run.network_ids, run.grid) == (24, (7,) * 24, (1, 4, 6))
    assert min(run.tokens) >= FIRST_IMAGE_TOKEN
    assert len(set(run.tokens)) == 24


def test_tokens_name_the_bytes_of_the_file_and_how_they_are_processed():
    image, same, other = encoded(noise()), encoded(noise()), encoded(noise(seed=1))
    again = encoded(noise(), "BMP")
    names = {processor().expand(picture).tokens for picture in (image, same)}
    assert len(names) == 1
    ways: Any
    for ways, picture in (({}, other), ({}, again), ({"settings": "x"}, image)):
        names.add(processor(**ways).expand(picture).tokens)
    assert len(names) == 4


def test_tokens_name_the_limit_where_it_shrinks_an_image_and_nowhere_else():
    """So that a limit that memory sets, or a new one, costs no more of what was computed than it must."""
    small, large = encoded(noise()), encoded(noise(300, 200))
    roomy, tight = processor(max_tokens=1000), processor(max_tokens=100)
    assert roomy.expand(small).tokens == tight.expand(small).tokens
    assert not set(roomy.expand(large).tokens) & set(tight.expand(large).tokens)
    similar = processor(max_tokens=93)
    assert len(similar.expand(large)) != len(tight.expand(large))
    assert not set(similar.expand(large).tokens) & set(tight.expand(large).tokens)


def test_an_image_of_a_known_size_is_expanded_without_a_look_at_its_pixels():
    patches = Patches()
    expander = processor(patches)
    expander.expand(encoded(noise()))
    run = expander.expand(encoded(noise(seed=1)))
    assert len(patches.seen) == 1
    assert np.array_equal(run.inputs()["pixel_values"], np.asarray(noise(seed=1)))
    assert len(patches.seen) == 2


def test_inputs_are_kept_for_who_needs_them_next():
    patches = Patches()
    run = processor(patches).expand(encoded(noise()))
    assert run.inputs() is run.inputs()
    assert len(patches.seen) == 1


@pytest.mark.parametrize(("size", "most"), [((600, 400), 100), ((2000, 100), 64), ((333, 777), 9)])
def test_an_image_with_too_many_tokens_is_shrunk_in_its_form(size, most):
    patches = Patches()
    expander = processor(patches, max_tokens=most)
    image = encoded(noise(*size))
    run = expander.expand(image)
    assert most * 0.6 <= len(run) <= most
    width, height = patches.seen[-1].size
    assert width / height == pytest.approx(size[0] / size[1], rel=0.15)
    assert expander.expand(image).inputs()["pixel_values"].shape[:2] == (height, width)


def test_a_model_whose_images_all_have_the_same_tokens_is_left_alone():
    def fixed(image: Pillow.Image) -> Preprocessed:
        return Preprocessed({"pixel_values": np.asarray(image)}, (7,) * 50, None)

    run = processor(fixed, max_tokens=20).expand(encoded(noise()))
    assert len(run) == 50
    assert np.array_equal(run.inputs()["pixel_values"], np.asarray(noise()))


def test_it_is_safe_in_several_threads():
    expander = processor()
    images = [encoded(noise(40 + 10 * (number % 5), 40, number)) for number in range(20)]
    alone = [processor().expand(image).tokens for image in images]
    results: list[list[tuple[int, ...]]] = []

    def expand() -> None:
        runs = [expander.expand(image) for image in images]
        assert all(run.inputs()["pixel_values"].size for run in runs)
        results.append([run.tokens for run in runs])

    threads = [Thread(target=expand) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [alone] * 4


# ------------------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("form", ["PNG", "BMP", "TIFF", "GIF", "WEBP", "AVIF"])
def test_every_format_is_read(form):
    options = {"lossless": True} if form == "WEBP" else {"quality": 100, "subsampling": "4:4:4"}
    seen = pixels(encoded(noise(), form, **(options if form in ("WEBP", "AVIF") else {})))
    assert seen.shape == (40, 60, 3)
    if form in ("PNG", "BMP", "TIFF", "WEBP"):
        assert np.array_equal(seen, np.asarray(noise()))


def test_the_first_frame_counts():
    frames = [Pillow.new("RGB", (20, 20), colour) for colour in ("red", "blue")]
    assert pixels(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))[0, 0, 0] == 255


def test_a_photo_is_turned_as_its_camera_says():
    shown = Pillow.new("RGB", (20, 10), "white")
    shown.putpixel((0, 0), (0, 0, 0))
    exif = Pillow.Exif()
    exif[0x0112] = 6  # turn it a quarter clockwise
    data = io.BytesIO()
    shown.save(data, "PNG", exif=exif)
    seen = pixels(Image(data.getvalue(), 10, 20))
    assert seen.shape == (20, 10, 3)
    assert tuple(seen[0, 9]) == (0, 0, 0)


def photo_with_a_mistyped_tag() -> bytes:
    """A photo on its side, of which a tag has a type that is read and cannot be written."""
    exif = Pillow.Exif()
    exif[0x0112] = 6
    exif[0x0128] = 2
    data = io.BytesIO()
    noise(20, 10).save(data, "JPEG", exif=exif)
    as_number, as_bytes = (struct.pack(">HH", 0x0128, kind) for kind in (3, 7))
    return data.getvalue().replace(as_number, as_bytes)


def test_a_photo_with_a_tag_that_cannot_be_written_again_is_turned():
    """Pillow writes all EXIF anew as it turns an image: the error would not be one of the image."""
    data = photo_with_a_mistyped_tag()
    image = ImageChecker(ImageLimits(max_bytes=10**6, max_pixels=10**6, max_count=1)).check(data)
    assert pixels(image).shape == (20, 10, 3)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "PA"])
def test_what_is_transparent_is_white(mode):
    """And not what its invisible colour is: text in black on nothing is readable."""
    shown = Pillow.new("RGBA", (20, 20), (0, 0, 0, 0))
    shown.paste((0, 0, 0, 255), (0, 0, 10, 20))
    form = "PNG" if mode != "PA" else "TIFF"
    seen = pixels(encoded(shown if mode in ("RGBA", "PA") else shown.convert(mode), form))
    assert tuple(seen[5, 15]) == (255, 255, 255)
    assert tuple(seen[5, 5]) == (0, 0, 0)


RAMP = np.arange(0, 2**16, 2**10, dtype=np.uint16).reshape(8, 8)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "TIFF of the other byte order"])
def test_of_sixteen_bits_the_upper_eight_are_seen(kind):
    values = RAMP.astype(">u2") if "other" in kind else RAMP
    seen = pixels(encoded(Pillow.fromarray(values), kind.split()[0]))
    assert np.array_equal(seen, np.repeat((RAMP >> 8).astype(np.uint8)[..., None], 3, axis=2))


def test_what_is_transparent_in_sixteen_bits_is_white():
    seen = pixels(encoded(Pillow.fromarray(RAMP), "PNG", transparency=2**10))
    assert [tuple(seen[0, column]) for column in (0, 1, 2)] == [(0, 0, 0), (255, 255, 255), (8, 8, 8)]


def test_twelve_bits_of_a_scanner_are_not_dark():
    """Pillow writes none: the tag is changed in a file of sixteen bits, and the pixels."""
    image = encoded(Pillow.fromarray(np.full((1, 2), 0x1234, np.uint16)), "TIFF")
    sixteen, twelve = (struct.pack("<HHII", 258, 3, 1, count) for count in (16, 12))
    data = image.data.replace(sixteen, twelve).replace(b"\x34\x12\x34\x12", bytes.fromhex("fff80000"))
    seen = pixels(Image(data, image.width, image.height))
    assert [tuple(pixel) for pixel in seen[0]] == [(255, 255, 255), (128, 128, 128)]


def test_tokens_of_sixteen_bits_are_not_those_that_named_a_white_image():
    """The KV on disk of before is that of an image in which all but the darkest was white."""
    image = encoded(Pillow.fromarray(RAMP))
    run = processor().expand(image)
    before = hashlib.blake2b(image.digest, digest_size=32)
    before.update(b"(8, 8) ")
    assert run.tokens != image_tokens(before.digest(), len(run))


def test_greys_are_read():
    assert tuple(pixels(encoded(Pillow.new("L", (20, 20), 90)))[0, 0]) == (90, 90, 90)
    assert pixels(encoded(Pillow.new("1", (20, 20), 1)))[0, 0, 0] == 255


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not an image",
        encoded(noise(200, 200)).data[:3000],
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
        b"P6 9 9 255 " + bytes(243),
    ],
    ids=["empty", "text", "cut short", "EPS", "SVG", "PPM"],
)
def test_what_cannot_be_decoded_is_refused_in_a_sentence(data):
    with pytest.raises(InvalidRequest, match="cannot be decoded"):
        processor().expand(Image(data, 9, 9))


def test_a_form_that_the_model_cannot_read_is_refused_in_a_sentence():
    with pytest.raises(InvalidRequest, match="cannot read an image of 300 by 2 pixels: it is too narrow"):
        processor().expand(encoded(noise(300, 2)))


def test_an_image_that_is_not_as_large_as_it_says_is_refused():
    """Of a size that is known or not: others of that size must not get its tokens."""
    expander = processor()
    small = Image(encoded(noise(20, 20)).data, 60, 40)
    with pytest.raises(InvalidRequest, match="not of the size that its header states"):
        expander.expand(small)
    assert len(expander.expand(encoded(noise(60, 40)))) == 24
    with pytest.raises(InvalidRequest, match="not of the size that its header states"):
        expander.expand(small).inputs()
