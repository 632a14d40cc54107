"""Replaces halves of surrogate pairs, which UTF-8 cannot encode, so no tokenizer accepts them.

Programs that cut text by UTF-16 units leave them, and JSON can spell them (as `\\ud83d`). A client that has
one in its history sends it with each request.
"""

import re

from start_llm.core.chat import Json

_HALF = re.compile("[\ud800-\udfff]")
_ESCAPED_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def may_have_halves(text: str) -> bool:
    """Return whether a JSON text spells a half. It may be one of a pair."""
    return _ESCAPED_HALF.search(text) is not None


def without_halves(value: Json) -> Json:
    """Return a value with U+FFFD in place of each half, in names of members too."""
    match value:
        case str():
            return _HALF.sub("\ufffd", value)
        case list():
            return [without_halves(item) for item in value]
        case dict():
            return {_HALF.sub("\ufffd", name): without_halves(item) for name, item in value.items()}
        case _:
            return value
