"""Writes calls and results of tools that a vendor ran as text: no template has a form for them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from start_llm.core.chat import Json

_OPAQUE = frozenset(
    {
        "type", "id", "call_id", "tool_use_id", "item_id", "cache_control", "caller", "container_id",
        "encrypted_content", "encrypted_index", "encrypted_stdout", "file_id",
    }
)  # fmt: skip
"""Members that say nothing to a model, at any depth."""


def vendor_text(kind: str, item: Mapping[str, Json], *, hidden: frozenset[str] = frozenset()) -> str:
    """Return lines with the type and all that the item says.

    Args:
        hidden: further members that say nothing to a model.
    """
    try:
        told = _members({name: value for name, value in item.items() if name not in hidden})
        lines = [f"[{kind}]", *_lines(told)]
    except RecursionError:
        lines = [f"[{kind}: it is nested too deeply]"]
    return "".join(f"{line}\n" for line in lines)


def _readable(value: Json) -> Json:
    """Return a value without opaque and empty members."""
    if isinstance(value, list):
        return [_readable(item) for item in value]
    return _members(value) if isinstance(value, dict) else value


def _members(item: Mapping[str, Json]) -> dict[str, Json]:
    members = {name: _readable(value) for name, value in item.items() if name not in _OPAQUE}
    return {name: value for name, value in members.items() if value not in (None, [], {})}


def _lines(members: Mapping[str, Json]) -> Iterator[str]:
    """Yield a line for each member; texts as they are, the members of an object below it."""
    for name, value in members.items():
        if isinstance(value, dict):
            yield from _lines(value)
        elif isinstance(value, str):
            yield f"{name}: {value}"
        elif isinstance(value, list):
            yield f"{name}:"
            yield from map(_entry, value)
        else:
            yield f"{name}: {_written(value)}"


def _entry(value: Json) -> str:
    if isinstance(value, dict) and value.keys() == {"text"}:
        return str(value["text"])
    return value if isinstance(value, str) else _written(value)


def _written(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False)
