"""What can be wrong with an image, in the words of the two vendors, to which their clients react."""

from dataclasses import dataclass

from start_llm.core.errors import StartLLMError


@dataclass(eq=False)
class ImageProblem(StartLLMError):
    """An image that is not accepted.

    Attributes:
        code: as OpenAI's API names it; None where that has no name.
        predicate: follows the name of the field in OpenAI's message.
        message: follows the place of the image in Anthropic's message.
    """

    code: str | None
    predicate: str
    message: str

    @property
    def note(self) -> str:
        """What the model reads in the image's place if the request is answered all the same."""
        return f"[image: {self.message}]"


def is_unseen() -> ImageProblem:
    return ImageProblem(None, "is an image, and this model cannot see images", "this model cannot see images")


def is_missing() -> ImageProblem:
    return ImageProblem(
        "invalid_image", "must hold an image: a data: URL, an address, or base64", "source: Field required"
    )


def is_a_file() -> ImageProblem:
    return ImageProblem(
        "image_file_not_found",
        "names a file, and this server keeps none; send the image itself",
        "this server keeps no files; send the image itself",
    )


def could_not_process(why: str) -> ImageProblem:
    return ImageProblem("invalid_image", f"is an image that cannot be read: {why}", "Could not process image")


def is_empty() -> ImageProblem:
    return ImageProblem("empty_image_file", "holds no image", "image cannot be empty")


def is_no_base64() -> ImageProblem:
    return ImageProblem("invalid_base64_image", "is not valid base64", "invalid base64 data")


def has_too_many_bytes(count: int, most: int) -> ImageProblem:
    megabytes = f"{most / 2**20:g} MB maximum: {count} bytes > {most} bytes"
    return ImageProblem(
        "image_file_too_large",
        f"is an image of {count} bytes; at most {most} are accepted (IMAGE_MAX_BYTES)",
        f"image exceeds {megabytes}",
    )


def has_too_many_pixels(width: int, height: int, most: int) -> ImageProblem:
    return ImageProblem(
        "image_too_large",
        f"is an image of {width}x{height} pixels; at most {most} pixels are accepted (IMAGE_MAX_PIXELS)",
        f"image dimensions exceed max allowed size: {width}x{height} pixels > {most} pixels",
    )


def is_too_narrow(width: int, height: int, most: int) -> ImageProblem:
    why = f"one side is more than {most} times as long as the other"
    return ImageProblem(
        "image_too_large",
        f"is an image of {width}x{height} pixels; {why}",
        f"image dimensions exceed max allowed aspect ratio: {width}x{height} pixels, {why}",
    )


def has_another_format(formats: str) -> ImageProblem:
    return ImageProblem(
        "invalid_image_format",
        f"is an unsupported image. Please make sure your image has one of the following formats: {formats}",
        f"Could not process image: it has none of the formats {formats}",
    )


def has_no_decoder(kind: str, package: str) -> ImageProblem:
    return ImageProblem(
        "invalid_image_format",
        f"is a {kind} image, which this server reads only if {package} is installed; send PNG or JPEG",
        f"Could not process image: {kind} needs {package} on the server",
    )


def has_no_scale() -> ImageProblem:
    why = "its numbers do not say which of them is white; send 8 or 16 bits for each"
    return ImageProblem(
        "invalid_image", f"is an image that cannot be read: {why}", f"Could not process image: {why}"
    )


def is_bad_address(why: str) -> ImageProblem:
    return ImageProblem("invalid_image_url", f"is not an address of an image: {why}", f"invalid URL: {why}")


def could_not_fetch(why: str) -> ImageProblem:
    return ImageProblem(
        "failed_to_download_image", f"cannot be downloaded: {why}", f"Unable to download the file: {why}"
    )


def are_too_many(most: int) -> ImageProblem:
    return ImageProblem(
        "too_many_images",
        f"is one image too many; at most {most} are accepted in a request (IMAGE_MAX_COUNT)",
        f"too many images in the request: at most {most} are accepted",
    )
