"""JSON as models write it, and as clients can read it."""

from __future__ import annotations

import json
import math
from typing import cast

import regex

from start_llm.core.chat import Json

_HALF_CHARACTER = regex.compile("[\ud800-\udfff]")


def _refuse(name: str) -> Json:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits} is too large")
    return number


DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse, parse_float=_finite)
"""Takes what `parsed` takes."""


def parsed(text: str) -> Json:
    """The value of a JSON text. ValueError if it is none, RecursionError if it is too deep.

    Line breaks inside strings, which JSON wants escaped, are what models forget most, so they pass. `NaN`,
    `Infinity` and numbers that become it do not: nobody could write the value down again.
    """
    return cast("Json", DECODER.decode(text))


def written(value: object) -> str:
    r"""JSON of a value. Halves of a character, which UTF-8 cannot hold, stay escaped as `\ud83d`."""
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if _HALF_CHARACTER.search(text) else text


def is_strict(text: str) -> bool:
    """Whether a text that `parsed` takes is JSON for everybody, and can be sent as it is."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return _HALF_CHARACTER.search(text) is None
