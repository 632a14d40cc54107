"""Mends values of a wrong type, so that a message that has one can still be read.

What can be written as text is not lost: a value that should be text becomes its JSON, and a call or a part
that cannot be read becomes text of its message. `null` means absent and stays.
"""

import json
from collections.abc import Callable, Mapping

from start_llm.core.chat import Json
from start_llm.protocols.content import TEXT_PARTS, TOOL_REFERENCE

type Item = dict[str, Json]
type Mend = Callable[[Json], Json]
"""Returns a value as it can be read."""


def as_text(value: Json) -> str:
    """Return a string as it is, nothing for `null`, and the JSON of any other value."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def text(value: Json) -> Json:
    return value if value is None else as_text(value)


def flag(value: Json) -> Json:
    return value if isinstance(value, bool) else None


def arguments(value: Json) -> Json:
    """Mend the arguments of a call: JSON text, or an object."""
    return value if isinstance(value, dict) else text(value)


def is_name(value: Json) -> bool:
    return isinstance(value, str) and bool(value)


def with_members(item: Item, mends: Mapping[str, Mend]) -> Item:
    """Return an object, with those of its members mended that `mends` names."""
    return {name: mends[name](value) if name in mends else value for name, value in item.items()}


def text_part(value: Json) -> Item:
    """Return what a part becomes that cannot be read: its text if it has one, else its JSON."""
    own = value.get("text") if isinstance(value, dict) else None
    return {"type": "text", "text": own if isinstance(own, str) else as_text(value)}


def content_of(part: Mend) -> Mend:
    """Return what mends a content: a string, or an array of parts that `part` mends."""

    def mend(value: Json) -> Json:
        match value:
            case None | str():
                return value
            case list():
                return [part(item) for item in value]
            case dict():
                return [part(value)]
            case _:
                return as_text(value)

    return mend


def openai_part(part: Json) -> Json:
    """Mend a part of a message or of a result in OpenAI's protocols."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or not is_name(part.get("type")):
        return text_part(part)
    kind = as_text(part["type"])
    if kind in TEXT_PARTS:
        return {**part, TEXT_PARTS[kind]: as_text(part.get(TEXT_PARTS[kind]))}
    is_lost = kind == TOOL_REFERENCE and not is_name(part.get("tool_name"))
    return text_part(part) if is_lost else part


def listed(value: Json) -> list[Json]:
    """Return the items of an array; one value that is none counts as its only item."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def with_texts(item: Item, lost: list[Json]) -> Item:
    """Add what cannot be read otherwise to the mended content of a message, as text."""
    if not lost:
        return item
    content = item.get("content")
    parts = content if isinstance(content, list) else [text_part(content)] if content else []
    return {**item, "content": [*parts, *map(text_part, lost)]}
