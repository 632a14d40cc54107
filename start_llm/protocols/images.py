"""What becomes of an image that the loaded model cannot see."""

from __future__ import annotations

from start_llm.core.errors import InvalidRequest
from start_llm.protocols.fields import Fields

UNSEEN_IMAGE = "[image: this model cannot see images]"


def unseen_image(part: Fields, *, is_refused: bool) -> str:
    """The text that stands for it.

    Args:
        is_refused: it is asked about now. Others become a note: refused, they would come back every turn.

    Raises:
        InvalidRequest: names an image that is refused.
    """
    if is_refused:
        raise InvalidRequest(f"'{part.path}' is an image, and this model cannot see images.", param=part.path)
    return UNSEEN_IMAGE
