"""Puts images into prompts: what the template writes for one, with the tokens of its run.

Templates and comparisons see the words of images (`core.images`). Only the finished text gets the rest.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from start_llm.core.errors import ModelError
from start_llm.core.images import Image, ImageRun, digest_of_word, image_words
from start_llm.prompt.pieces import Encoded, PieceEncoder
from start_llm.prompt.substitution import substitute
from start_llm.prompt.template import TemplateTokenizer


class ImageExpander(Protocol):
    """The model's image processor, as the prompt layer needs it. Safe to use from any thread."""

    @property
    def placeholder(self) -> str:
        """What the chat template writes for an image, and a run of tokens replaces: an added token."""
        ...

    @property
    def before(self) -> str:
        """Text that the processor puts in front of the run."""
        ...

    @property
    def after(self) -> str:
        """Text that it puts behind the run."""
        ...

    def expand(self, image: Image) -> ImageRun:
        """Return the tokens of an image. One of a new size is decoded, and processed up to nine times."""
        ...


class ImageEncoder:
    """Tokenises rendered texts with images. Safe to use from any thread.

    Args:
        processor: None for a model that sees no images.
        written: what the template writes around a placeholder.

    Raises:
        ModelError: the placeholder is not one token.
    """

    def __init__(
        self,
        tokenizer: TemplateTokenizer,
        pieces: PieceEncoder,
        processor: ImageExpander | None,
        written: tuple[str, str] | None,
    ) -> None:
        self._pieces = pieces
        self._processor = processor
        self._head = self._whole = ""
        if processor is not None:
            before, after = written or ("", "")
            if len(tokenizer.encode(processor.placeholder, as_document=False)) != 1:
                raise ModelError(
                    f"The model's placeholder for images, {processor.placeholder!r}, is not a token."
                )
            self._head = before + processor.before
            self._whole = self._head + processor.placeholder + processor.after + after

    def runs(self, images: Mapping[bytes, Image]) -> dict[bytes, ImageRun]:
        """Return the run of each image of a request."""
        if self._processor is None:
            return {}
        return {digest: self._processor.expand(image) for digest, image in images.items()}

    def encode(
        self, text: str, cuts: Sequence[int], runs: Mapping[bytes, ImageRun], breaks: Sequence[int] = ()
    ) -> Encoded:
        """Tokenise a text in which words stand for images.

        Args:
            cuts, breaks: as `PieceEncoder.encode` takes them; none lies in a word.
            runs: the images' runs by their digests.
        """
        if not runs:
            return self._pieces.encode(text, cuts, breaks=breaks)
        words = list(image_words(text))
        done = substitute(text, words, lambda _: self._whole)
        placeholders = {
            start + len(self._head): runs[digest_of_word(word.group())]
            for word, start in zip(words, done.starts, strict=True)
        }
        moved = ([done.moved(offset) for offset in offsets] for offsets in (cuts, breaks))
        return self._pieces.encode(done.text, *moved, images=placeholders)
