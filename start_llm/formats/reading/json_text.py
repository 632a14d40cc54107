"""Parses the JSON that models write, and writes JSON that clients can parse."""

import json
import math
from typing import cast

import regex

from start_llm.core.chat import Json

_HALF_CHARACTER = regex.compile("[\ud800-\udfff]")
_ESCAPE = regex.compile(
    r"\\(?:u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|(?P<half>u[dD][89a-fA-F][\da-fA-F]{2})|.)",
    regex.DOTALL,
)


def _refuse(name: str) -> Json:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits} is too large")
    return number


DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse, parse_float=_finite)
"""Accepts the same JSON as `parsed`."""


def parsed(text: str) -> Json:
    """Parse a JSON text.

    Unescaped line breaks in strings are accepted, because models often forget to escape them. `NaN`,
    `Infinity` and numbers that overflow to it are not, because the value could not be written as JSON again.

    Raises:
        ValueError: the text is not JSON.
        RecursionError: it is nested too deeply.
    """
    return cast("Json", DECODER.decode(text))


def written(value: object) -> str:
    r"""Return the JSON of a value. Halves of surrogate pairs, which UTF-8 cannot encode, are escaped.

    `with_whole_characters` replaces them where arguments go out.
    """
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if _HALF_CHARACTER.search(text) else text


def with_whole_characters(json_text: str) -> str:
    r"""Return strict JSON with U+FFFD for each half of a surrogate pair, which clients refuse as `\ud83d`.

    Everything else stays as it is written, also a pair of two escapes.
    """
    return _ESCAPE.sub(_whole, json_text) if "\\u" in json_text else json_text


def _whole(escape: regex.Match[str]) -> str:
    return "\ufffd" if escape["half"] else escape[0]


def is_strict(text: str) -> bool:
    """Return True if a text that `parsed` accepts is strict JSON and can be sent unchanged."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return _HALF_CHARACTER.search(text) is None
