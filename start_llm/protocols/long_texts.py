"""Parses and encodes JSON with long texts, such as images, without holding up other threads.

Python's parser and encoder keep the interpreter for themselves until a text is done, 2 to 8 ms for each
megabyte. So long texts are taken out, handled in steps, and put back.
"""

import re
import secrets
import string
from collections.abc import Iterator, Mapping
from typing import Any

from start_llm.core.chat import Json
from start_llm.storage.database_file import encode_json

_LONG = 2**20
_STEP = 2**18
_FIRST = (string.ascii_letters + string.digits + "+/").encode()
"""What base64 and data URLs begin with. What stands between two texts of JSON begins otherwise."""
_PLAIN = _FIRST + b"=:;,.-_%"
_WORD = f"text{secrets.token_hex(16)}x"
_ANY_WORD = re.compile(rf"{_WORD}(\d+)x")
_ANY_ENCODED_WORD = re.compile(_ANY_WORD.pattern.encode())
_QUOTE = b'"'
_DEEPEST = 12


def without_long_texts(raw: bytes) -> tuple[bytes, list[str]]:
    """Take long texts of plain characters out of JSON.

    Returns:
        The JSON with words in their place, and the texts, for `with_long_texts`.
    """
    pieces, texts, kept = list[bytes](), list[str](), 0
    for start, end in _long_texts(raw):
        text = _plain_text(raw, start, end)
        if text is not None:
            pieces += [raw[kept:start], f"{_WORD}{len(texts)}x".encode()]
            texts.append(text)
            kept = end
    return (b"".join([*pieces, raw[kept:]]) if texts else raw), texts


def _long_texts(raw: bytes) -> Iterator[tuple[int, int]]:
    """Yield what stands between two neighbouring quotes, if it is long and begins like an image."""
    start = raw.find(_QUOTE) + 1 if len(raw) > _LONG else 0
    while start and (end := raw.find(_QUOTE, start)) >= 0:
        if end - start > _LONG and raw[start] in _FIRST:
            yield start, end
        start = end + 1


def _plain_text(raw: bytes, start: int, end: int) -> str | None:
    pieces: list[str] = []
    for place in range(start, end, _STEP):
        piece = raw[place : min(place + _STEP, end)]
        if piece.translate(None, _PLAIN):
            return None
        pieces.append(piece.decode("ascii"))
    return "".join(pieces)


def with_long_texts(value: Json, texts: list[str]) -> Json:
    """Put the texts back into parsed JSON."""
    match value:
        case str() if _WORD in value:
            whole = _ANY_WORD.fullmatch(value)
            return texts[int(whole[1])] if whole else _ANY_WORD.sub(lambda word: texts[int(word[1])], value)
        case list():
            return [with_long_texts(item, texts) for item in value]
        case dict():
            return {
                str(with_long_texts(key, texts)): with_long_texts(item, texts) for key, item in value.items()
            }
        case _:
            return value


def encoded_in_steps(value: Any) -> bytes:
    """Return what `storage.database_file.encode_json` returns."""
    texts: list[str] = []
    pieces = _ANY_ENCODED_WORD.split(encode_json(_shortened(value, texts)))
    # Every second piece is the number of a text.
    return b"".join(_encoded_text(texts[int(piece)]) if at % 2 else piece for at, piece in enumerate(pieces))


def long_text_length(value: Any) -> int:
    """Return the number of characters in long texts, which their encoding has at least."""
    texts: list[str] = []
    _shortened(value, texts)
    return sum(map(len, texts))


def _shortened(value: Any, texts: list[str], depth: int = _DEEPEST) -> Any:
    """Replace long texts by words, and collect them. What is nested deeper than images are stays."""
    if not depth:
        return value
    match value:
        case str() if len(value) > _LONG:
            texts.append(value)
            return f"{_WORD}{len(texts) - 1}x"
        case list() | tuple():
            return [_shortened(item, texts, depth - 1) for item in value]
        case Mapping():
            return {key: _shortened(item, texts, depth - 1) for key, item in value.items()}
        case _:
            return value


def _encoded_text(text: str) -> bytes:
    return b"".join(encode_json(text[place : place + _STEP])[1:-1] for place in range(0, len(text), _STEP))
