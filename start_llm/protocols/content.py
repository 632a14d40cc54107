"""Reads text from the forms that clients send: strings, parts, arguments of calls."""

from __future__ import annotations

from collections.abc import Mapping

from start_llm.core.chat import Json
from start_llm.core.errors import InvalidRequest
from start_llm.protocols.fields import Fields, parse_embedded, type_name

TOOL_REFERENCE = "tool_reference"
UNSEEN_IMAGE = "[image: this model cannot see images]"
UNSEEN_FILE = "[file: this model cannot read files]"
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_UNSEEN_PARTS = {
    **dict.fromkeys(("image_url", "input_image", "image"), UNSEEN_IMAGE),
    **dict.fromkeys(("file", "input_file"), UNSEEN_FILE),
}
_REFUSALS = {
    UNSEEN_IMAGE: "is an image, and this model cannot see images",
    UNSEEN_FILE: "is a file, and this model cannot read files",
}


def read_content(item: Fields, name: str = "content", *, may_hold_images: bool) -> str:
    """Return a string, or an array of parts joined.

    Args:
        may_hold_images: replace parts that the model cannot see by a note; otherwise refuse them.

    Raises:
        InvalidRequest: names a part that is malformed or refused.
    """
    value = item.value(name)
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise item.expected(name, "a string or an array of parts")
    parts: list[str] = []
    for index, part in enumerate(value):
        where = f"{name}[{index}]"
        if isinstance(part, str):
            parts.append(part)
        elif isinstance(part, dict):
            parts.append(_part(Fields(part, item.path_of(where)), may_hold_images=may_hold_images))
        else:
            raise item.fail(where, f"must be a string or an object, not {type_name(part)}")
    return "".join(parts)


def _part(part: Fields, *, may_hold_images: bool) -> str:
    kind = part.required_text("type")
    if kind == TOOL_REFERENCE:
        return ""
    if kind in _TEXT_PARTS:
        text = part.text(_TEXT_PARTS[kind])
        if text is None:
            raise part.fail(_TEXT_PARTS[kind], "is required and must be a string")
        return text
    if kind in _UNSEEN_PARTS:
        return _unseen(part, _UNSEEN_PARTS[kind], is_refused=not may_hold_images)
    if may_hold_images:
        return text_or_note(part, kind)
    raise part.fail("type", f"is {kind!r}; this model reads text")


def text_or_note(part: Fields, kind: str) -> str:
    """Return the text of an unknown part, or a note that the part was there."""
    text = part.value("text")
    return text if isinstance(text, str) else f"[{kind}: this model cannot read it]"


def _unseen(part: Fields, note: str, *, is_refused: bool) -> str:
    """Return the note for a part that the model cannot see.

    Args:
        is_refused: the part belongs to the current question. Older parts become the note, because clients
            would send a refused part again in every turn.

    Raises:
        InvalidRequest: names a part that is refused.
    """
    if is_refused:
        raise InvalidRequest(f"'{part.path}' {_REFUSALS[note]}.", param=part.path)
    return note


def read_arguments(call: Fields) -> Mapping[str, Json]:
    """Parse the arguments, which clients send as JSON text. Text that is not an object goes under `raw`."""
    value = call.value("arguments")
    if value is None or value == "":
        return {}
    if isinstance(value, dict):
        return value
    if not isinstance(value, str):
        raise call.expected("arguments", "a string of JSON")
    parsed = parse_embedded(value)
    return parsed if isinstance(parsed, dict) else {"raw": value}
