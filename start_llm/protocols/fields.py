"""Reads typed fields of JSON bodies. Every error names the path of the field.

`null` means absent, because clients send it for fields that they do not set. Unknown fields are ignored.
Reading raises `InvalidRequest`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from typing import cast

from start_llm.core.chat import Json
from start_llm.core.errors import InvalidRequest
from start_llm.core.half_characters import may_have_halves, without_halves
from start_llm.core.sampling import Range
from start_llm.protocols.long_texts import with_long_texts, without_long_texts

_QUOTE, _ESCAPE = b'"', ord("\\")
_BEFORE_VALUES = (b",", b"[", b"{")
"""In JSON one of these precedes each value of an array and each member of an object."""


def has_more_values(raw: bytes, most: int) -> bool:
    """Return whether JSON has more than about so many values, without parsing it. Names do not count.

    Python's parser keeps the interpreter for itself until it is done. For a text that hardly matters, but ten
    million empty lists, 30 MB, take it four seconds, and another one when they are let go.
    """
    if _separators(raw, 0, len(raw)) <= most:
        return False
    # They may stand in texts. What stands between texts is counted, and other threads run meanwhile.
    count, start = 0, 0
    while start < len(raw):
        opening = raw.find(_QUOTE, start)
        end = len(raw) if opening < 0 else opening
        count += _separators(raw, start, end)
        if count > most:
            return True
        start = _after_text(raw, end + 1)
    return False


def _separators(raw: bytes, start: int, end: int) -> int:
    return sum(raw.count(separator, start, end) for separator in _BEFORE_VALUES)


def _after_text(raw: bytes, start: int) -> int:
    """Return the place behind the quote that closes a text."""
    while (closing := raw.find(_QUOTE, start)) >= 0:
        escapes = closing
        while escapes > start and raw[escapes - 1] == _ESCAPE:
            escapes -= 1
        if (closing - escapes) % 2 == 0:
            return closing + 1
        start = closing + 1
    return len(raw)


_LONGEST_INTEGER = 1000
MOST_VALUES = 2**22
"""Values of a body. While Python's parser makes them, and again when they go, no other thread runs: half a
second for so many."""
_TYPE_NAMES: Mapping[type, str] = {
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "an array",
    type(None): "null",
}


def parse_body(raw: bytes) -> Fields:
    """Parse a request body. A half of a surrogate pair becomes U+FFFD.

    Raises:
        InvalidRequest: not UTF-8, not JSON, not an object, too deep, or of too many values.
    """
    if has_more_values(raw, MOST_VALUES):
        raise InvalidRequest(f"The body has more than {MOST_VALUES:,} values.")
    try:
        short, texts = without_long_texts(raw)
        text = short.decode("utf-8-sig")
        sent = _parse_json(text)
        value = without_halves(sent) if may_have_halves(text) else sent
        mended = _differing(sent, value)
        value = with_long_texts(value, texts) if texts else value
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The body is not valid UTF-8: {error.reason} at byte {error.start}.") from error
    except RecursionError as error:
        raise InvalidRequest("The body is nested too deeply.") from error
    except ValueError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"The body must be a JSON object, not {type_name(value)}.")
    return Fields(value, mended=mended)


def parse_embedded(text: str) -> Json:
    """Parse JSON in a client's string, as `parse_body` does.

    Returns:
        None if it is not JSON, is nested too deeply or has too many values.
    """
    try:
        if len(text) > MOST_VALUES and has_more_values(text.encode(), MOST_VALUES):
            return None
        value = _parse_json(text)
        return without_halves(value) if may_have_halves(text) else value
    except (RecursionError, ValueError):
        return None


def _parse_json(text: str) -> Json:
    return cast("Json", _DECODER.decode(text))


def _differing(sent: Json, value: Json) -> frozenset[str]:
    """Return the paths of the items in arrays of a body that are not as they were sent."""
    if sent is value or not (isinstance(sent, dict) and isinstance(value, dict)):
        return frozenset()
    arrays = [(name, items, value.get(name)) for name, items in sent.items() if isinstance(items, list)]
    return frozenset(
        f"{name}[{index}]"
        for name, items, others in arrays
        if isinstance(others, list)
        for index, (item, other) in enumerate(zip(items, others, strict=True))
        if item != other
    )


def _parse_integer(digits: str) -> int | float:
    """Parse an integer, or one of over 1000 digits as a float, so that a field's error can name the field."""
    return int(digits) if len(digits) <= _LONGEST_INTEGER else _parse_float(digits)


def _parse_float(digits: str) -> float:
    """Parse a float. Clamp to the largest finite number, because infinity is not JSON."""
    number = float(digits)
    return number if math.isfinite(number) else math.copysign(sys.float_info.max, number)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(
    parse_int=_parse_integer, parse_float=_parse_float, parse_constant=_refuse_constant
)


def type_name(value: Json) -> str:
    """Return the JSON type of a value, with its article."""
    return _TYPE_NAMES.get(type(value), "an object")


class Fields:
    """The members of one JSON object, and its path in the body.

    Attributes:
        mended: of a whole body, the paths of items that are not as they were sent.
    """

    def __init__(
        self, data: Mapping[str, Json], path: str = "", *, mended: frozenset[str] = frozenset()
    ) -> None:
        self.data = data
        self.path = path
        self.mended = mended

    def note_mended(self, path: str) -> None:
        """Note that something at this path is not read as the client sent it."""
        self.mended |= {path}

    def path_of(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def value(self, name: str) -> Json:
        return self.data.get(name)

    def fail(self, name: str, problem: str) -> InvalidRequest:
        """Return the error to raise about field `name`."""
        path = self.path_of(name)
        return InvalidRequest(f"'{path}' {problem}.", param=path)

    def expected(self, name: str, what: str) -> InvalidRequest:
        return self.fail(name, f"must be {what}, not {type_name(self.value(name))}")

    def text(self, name: str) -> str | None:
        value = self.value(name)
        if value is not None and not isinstance(value, str):
            raise self.expected(name, "a string")
        return value

    def required_text(self, name: str) -> str:
        text = self.text(name)
        if not text:
            raise self.fail(name, "is required and must be a non-empty string")
        return text

    def given_text(self, name: str) -> str:
        """Return a text that must be there, and may be empty."""
        text = self.text(name)
        if text is None:
            raise self.fail(name, "is required and must be a string")
        return text

    def choice[Meaning](self, name: str, words: Mapping[str, Meaning]) -> Meaning:
        """Return what the word in a required field stands for."""
        word = self.required_text(name)
        if word not in words:
            raise self.fail(name, f"is {word!r}; it must be one of {', '.join(words)}")
        return words[word]

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.expected(name, "a boolean")
        return value

    def number(self, name: str, allowed: Range) -> float | None:
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.expected(name, "a number")
        if value not in allowed:
            raise self.fail(name, f"must be {allowed}")
        return value

    def integer(self, name: str, allowed: Range) -> int | None:
        value = self.number(name, allowed)
        if value is None:
            return None
        if value != int(value):
            raise self.fail(name, "must be a whole number")
        return int(value)

    def array(self, name: str) -> list[Json]:
        """Return the items of an array; empty if the field is absent."""
        value = self.value(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.expected(name, "an array")
        return value

    def object(self, name: str) -> Fields | None:
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.expected(name, "an object")
        return Fields(value, self.path_of(name))

    def required_object(self, name: str) -> Fields:
        value = self.object(name)
        if value is None:
            raise self.fail(name, "is required and must be an object")
        return value

    def objects(self, name: str) -> Iterator[Fields]:
        """Yield the items of an array of objects."""
        for index, item in enumerate(self.array(name)):
            path = f"{self.path_of(name)}[{index}]"
            if not isinstance(item, dict):
                raise InvalidRequest(f"'{path}' must be an object, not {type_name(item)}.", param=path)
            yield Fields(item, path)

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a string, or an array of strings, as a tuple."""
        value = self.value(name)
        if value is None:
            return ()
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list):
            raise self.expected(name, "a string or an array of strings")
        for index, item in enumerate(value):
            if not isinstance(item, str):
                raise self.fail(f"{name}[{index}]", f"must be a string, not {type_name(item)}")
        return tuple(cast("list[str]", value))
