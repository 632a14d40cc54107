"""Parses values whose parts are elements: `<item>` per array item, one named tag per object member.

Every tag has a mark before it that does not occur in texts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from start_llm.core.chat import Json
from start_llm.formats.reading.block import compiled
from start_llm.formats.reading.schema import Shape, decode

ITEM = "item"
_WITH_PARTS = frozenset({"array", "object"})
_TAG = r"<(?P<slash>/?)(?P<name>[^<>\n]{1,256})>"


@dataclass(slots=True)
class _Element:
    """An element of the text: content from `start` to `end`, with its tags from `before` to `after`."""

    name: str
    before: int
    start: int
    end: int = 0
    after: int = 0
    parts: list[_Element] = field(default_factory=list["_Element"])


def decode_nested(mark: str, raw: str, shape: Shape) -> Json:
    """Parse a value by its schema. It may be JSON instead of elements. Strings stay unchanged.

    Args:
        mark: a regular expression for the text before each tag.
    """
    try:
        return _value(raw, _whole(mark, raw), shape)
    except (ValueError, RecursionError):
        return decode(raw, shape.types)


def _whole(mark: str, raw: str) -> _Element:
    """Return the tree of elements.

    Raises:
        ValueError: the elements are not closed in order.
    """
    whole = _Element("", 0, 0, len(raw), len(raw))
    opened = [whole]
    for tag in compiled(mark + _TAG).finditer(raw):
        if not tag["slash"]:
            opened.append(_Element(tag["name"], tag.start(), tag.end()))
            opened[-2].parts.append(opened[-1])
            continue
        element = opened.pop()
        if element.name != tag["name"]:
            raise ValueError("a tag closes another element")
        element.end, element.after = tag.span()
    if len(opened) > 1:
        raise ValueError("a tag is not closed")
    return whole


def _value(raw: str, element: _Element, shape: Shape) -> Json:
    kinds = frozenset[str]() if _has_text_beside(raw, element) else _kinds(element, shape.types)
    if "array" in kinds and all(part.name == ITEM for part in element.parts):
        return [_value(raw, part, shape.items) for part in element.parts]
    if "object" in kinds:
        return {part.name: _value(raw, part, shape.member(part.name)) for part in element.parts}
    return decode(raw[element.start : element.end], shape.types)


def _kinds(element: _Element, types: frozenset[str]) -> frozenset[str]:
    """Return which of array and object it may be. An empty element is a string if that is allowed."""
    if element.parts and not types:
        return _WITH_PARTS
    return types & _WITH_PARTS if element.parts or "string" not in types else frozenset()


def _has_text_beside(raw: str, element: _Element) -> bool:
    starts = [element.start, *(part.after for part in element.parts)]
    ends = [*(part.before for part in element.parts), element.end]
    return any(raw[start:end].strip() for start, end in zip(starts, ends, strict=True))
