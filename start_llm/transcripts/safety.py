"""Whether a recorded prefix says what a fresh rendering says: for users who want that checked each time."""

from __future__ import annotations

import re

_WORD = re.compile(r"\w+")


def says_the_same(recorded: str, fresh: str) -> bool:
    """Every word of the fresh text is in the recorded one, in the same order; thoughts may stand between."""
    words = iter(_WORD.findall(recorded))
    return all(word in words for word in _WORD.findall(fresh))
