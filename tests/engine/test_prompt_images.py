"""Where images are in a prompt, and where the text behind them stands."""

from __future__ import annotations

import pytest

from start_llm.core.images import ImageRun, image_tokens
from start_llm.engine.prompt_images import PromptImages


def run(name: bytes, grid: tuple[int, int, int]) -> ImageRun:
    count = grid[0] * grid[1] * grid[2]
    return ImageRun(image_tokens(name, count), (9,) * count, grid, dict)


FIRST, SECOND = run(b"a", (1, 2, 4)), run(b"b", (1, 3, 3))
IDS = (1, 2, *FIRST.tokens, 3, *SECOND.tokens, 4, 5)
"""Text at 0 and 1, an image from 2 to 10, text at 10, an image from 11 to 20, text at 20 and 21."""


def images() -> PromptImages:
    return PromptImages(IDS, [SECOND, FIRST])


def test_images_are_found_in_order_wherever_they_are_listed():
    assert [(span.start, span.end, span.run) for span in images().spans] == [(2, 10, FIRST), (11, 20, SECOND)]


def test_text_behind_an_image_stands_as_far_on_as_its_longer_side():
    """2 + 4 = 6 is the place of token 10, and 7 + 3 = 10 that of token 20."""
    layout = images()
    assert [layout.shift_at(place) for place in (0, 1, 10, 20, 21)] == [0, 0, -4, -10, -10]
    assert layout.shift == -10


def test_the_tokens_of_an_image_stand_in_a_grid():
    layout = images()
    first, second = layout.spans
    assert layout.positions(first, 2, 10) == [[2] * 8, [2] * 4 + [3] * 4, [2, 3, 4, 5] * 2]
    assert layout.positions(second, 11, 20) == [
        [7] * 9,
        [7] * 3 + [8] * 3 + [9] * 3,
        [7, 8, 9] * 3,
    ]
    whole = layout.positions(second, 11, 20)
    parts = [layout.positions(second, start, end) for start, end in ((11, 15), (15, 20))]
    assert whole == [[*left, *right] for left, right in zip(*parts, strict=True)]


def test_an_image_without_a_grid_moves_nothing():
    flat = ImageRun(FIRST.tokens, FIRST.network_ids, None, dict)
    layout = PromptImages(IDS, [flat, SECOND])
    assert (layout.shift_at(10), layout.positions(layout.spans[0], 2, 10)) == (0, None)


def test_chunks_end_where_images_begin_and_end():
    layout = images()
    assert [layout.edge_after(place, len(IDS)) for place in (0, 2, 9, 10, 11, 20)] == [2, 10, 10, 11, 20, 22]
    assert [bool(layout.span_at(place)) for place in (1, 2, 9, 10, 11, 20)] == [
        False,
        True,
        True,
        False,
        True,
        False,
    ]


def test_the_network_reads_its_own_ids():
    assert images().network_ids([*IDS, 6]) == [1, 2, *[9] * 8, 3, *[9] * 9, 4, 5, 6]


def test_a_prompt_without_images_has_none():
    layout = PromptImages((1, 2, 3), [])
    assert (layout.spans, layout.shift, layout.edge_after(0, 3), layout.network_ids([1])) == ((), 0, 3, [1])


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        ((1, *FIRST.tokens, 2, *SECOND.tokens[:3], 3), "does not bring"),
        ((1, *FIRST.tokens[:5], 2), "only a part"),
        ((1, *FIRST.tokens[3:], 2), "does not bring"),
    ],
)
def test_a_prompt_with_a_part_of_an_image_is_refused(ids, problem):
    with pytest.raises(ValueError, match=problem):
        PromptImages(ids, [FIRST])
