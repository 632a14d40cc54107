"""Where the images of a prompt are, and how they move the positions of the tokens after them."""

from collections.abc import Sequence
from itertools import accumulate

from start_llm.core.images import FIRST_IMAGE_TOKEN, ImageRun, ImageSpan, image_spans

type Positions = list[list[int]]
"""The positions of tokens on three axes: time, rows, columns."""


class PromptImages:
    """The images of one prompt.

    A network whose positions have three axes gives the tokens of an image the places of a grid, so that
    text after it stands nearer than the number of tokens in front of it says. The difference is the *shift*.

    Args:
        ids: the prompt.
        runs: of its images, in any order.

    Raises:
        ValueError: the prompt has tokens of an image that is not among these.
    """

    def __init__(self, ids: Sequence[int], runs: Sequence[ImageRun]) -> None:
        self.spans: tuple[ImageSpan, ...] = ()
        if runs or max(ids, default=0) >= FIRST_IMAGE_TOKEN:
            self.spans = _spans(ids, runs)
        self._shifts = list(accumulate(self.spans, _shift_behind, initial=0))

    @property
    def shift(self) -> int:
        """The shift after all images."""
        return self._shifts[-1]

    def span_at(self, position: int) -> ImageSpan | None:
        """Return the image to which the token at this position belongs."""
        return next((span for span in self.spans if span.start <= position < span.end), None)

    def shift_at(self, position: int) -> int:
        """Return the shift of a text token."""
        return self._shifts[sum(span.end <= position for span in self.spans)]

    def edge_after(self, position: int, end: int) -> int:
        """Return where the text or the image at a position ends; `end` if nothing follows."""
        edges = (edge for span in self.spans for edge in (span.start, span.end))
        return next((edge for edge in edges if edge > position), end)

    def positions(self, span: ImageSpan, start: int, end: int) -> Positions | None:
        """Return the positions of tokens `start` to `end` of a prompt, which belong to an image.

        None if the network's positions have one axis.
        """
        if span.run.grid is None:
            return None
        _, rows, columns = span.run.grid
        first = span.start + self.shift_at(span.start)
        places = range(start - span.start, end - span.start)
        return [
            [first + place // (rows * columns) for place in places],
            [first + place // columns % rows for place in places],
            [first + place % columns for place in places],
        ]

    def network_ids(self, tokens: Sequence[int]) -> list[int]:
        """Return tokens that begin with the prompt's as the network reads them."""
        ids = list(tokens)
        for span in self.spans:
            ids[span.start : span.end] = span.run.network_ids
        return ids


def _spans(ids: Sequence[int], runs: Sequence[ImageRun]) -> tuple[ImageSpan, ...]:
    try:
        spans = image_spans(ids, {run.tokens[0]: run for run in runs})
    except KeyError as error:
        raise ValueError("the prompt has tokens of an image that the request does not bring") from error
    if any(tuple(ids[span.start : span.end]) != span.run.tokens for span in spans):
        raise ValueError("the prompt has only a part of an image's tokens")
    return tuple(spans)


def _shift_behind(shift: int, span: ImageSpan) -> int:
    """Return the shift after an image if it is `shift` in front of it."""
    return shift if span.run.grid is None else shift + max(span.run.grid) - len(span.run)
