"""Images and image processors for tests, without pixels and without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from start_llm.core.images import FIRST_IMAGE_TOKEN, Image, ImageRun, image_tokens
from tests.templates.traits import trait_tokenizer

PATCH = 28


def image(name: str, width: int = 56, height: int = 84) -> Image:
    """An image that is nothing but a name: equal names are equal images."""
    return Image(name.encode(), width, height)


def by_digest(*images: Image) -> dict[bytes, Image]:
    return {item.digest: item for item in images}


def _whole_grid(columns: int, rows: int) -> list[str]:
    return ["<|image_pad|>"] * columns * rows


def _between_marks(opening: str, soft: str, closing: str) -> Callable[[int, int], list[str]]:
    return lambda columns, rows: [opening, *[soft] * columns * rows, closing]


def _in_rows(columns: int, rows: int) -> list[str]:
    return [*([*["[IMG]"] * columns, "[IMG_BREAK]"] * rows)[:-1], "[IMG_END]"]


@dataclass(frozen=True)
class FakeVision:
    """Expands an image to one token for each patch, with the marks of a family.

    Attributes:
        limit: part of what names an image's tokens, as a real processor's limits are.
    """

    encode: Callable[[str], Sequence[int]]
    placeholder: str
    texts: Callable[[int, int], list[str]]
    before: str = ""
    after: str = ""
    limit: bytes = b""

    def network_texts(self, image: Image) -> list[str]:
        return self.texts(-(-image.width // PATCH), -(-image.height // PATCH))

    def expand(self, image: Image) -> ImageRun:
        network = tuple(token for text in self.network_texts(image) for token in self.encode(text))
        return ImageRun(
            tokens=image_tokens(image.digest + self.limit, len(network)),
            network_ids=network,
            grid=None,
            inputs=lambda: {"pixels": image.data},
        )

    def text(self, image: Image) -> str:
        """All that the processor puts in the place of the placeholder, as text."""
        return "".join([self.before, *self.network_texts(image), self.after])


_FORMS: dict[str, dict[str, Any]] = {
    "sees_everywhere": {"placeholder": "<|image_pad|>", "texts": _whole_grid},
    "sees_in_questions": {
        "placeholder": "<start_of_image>",
        "texts": _between_marks("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
        "before": "\n\n",
        "after": "\n\n",
    },
    "sees_behind_results": {
        "placeholder": "<|image|>",
        "texts": _between_marks("<|image>", "<|image|>", "<image|>"),
    },
    "sees_marks": {"placeholder": "[IMG]", "texts": _in_rows},
}


@cache
def vision_of(trait: str, **more: Any) -> FakeVision | None:
    """The image processor of a trait; None if its models are blind."""
    tokenizer = trait_tokenizer(trait)
    form = _FORMS.get(trait)
    if form is None:
        return None
    return FakeVision(lambda text: tokenizer.encode(text, as_document=False), **form | more)


def network_ids(ids: Sequence[int], runs: Sequence[ImageRun]) -> list[int]:
    """A prompt as its network reads it."""
    named = {token: seen for run in runs for token, seen in zip(run.tokens, run.network_ids, strict=True)}
    return [named[token_id] if token_id >= FIRST_IMAGE_TOKEN else token_id for token_id in ids]
