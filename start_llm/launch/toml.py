"""Write TOML, which the standard library can only read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def as_toml(document: Mapping[str, Any]) -> str:
    """Return text that `tomllib` parses into `document`."""
    return "\n".join(_table(document, ())) + "\n"


def _table(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """Yield the lines of a table, values before subtables: every line after a heading belongs to it."""
    tables = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    values = {key: value for key, value in table.items() if key not in tables}
    if path and (values or not tables):
        yield f"\n[{'.'.join(map(_key, path))}]"
    for key, value in values.items():
        yield f"{_key(key)} = {_value(value)}"
    for key, inner in tables.items():
        yield from _table(inner, (*path, key))


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return _text(value)
        case int() | float():
            return repr(value)
        case Mapping():
            return "{" + ", ".join(f"{_key(key)} = {_value(inner)}" for key, inner in value.items()) + "}"
        case Sequence():
            return "[" + ", ".join(map(_value, value)) + "]"
        case _:
            return value.isoformat()


def _key(key: str) -> str:
    is_bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if is_bare else _text(key)


def _text(text: str) -> str:
    """Return a basic string. It equals JSON's, except that TOML requires U+007F to be escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
