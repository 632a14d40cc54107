"""Reads text from the forms that clients send: strings, parts, arguments of calls."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from start_llm.core.chat import Json, KeptPlace, Message
from start_llm.core.errors import InvalidRequest
from start_llm.protocols.breakpoints import places, seconds_of
from start_llm.protocols.fields import Fields, parse_embedded, type_name
from start_llm.protocols.image_parts import IMAGE_PARTS, ImageParser

TOOL_REFERENCE = "tool_reference"
UNSEEN_FILE = "[file: this model cannot read files]"
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_FILE_PARTS = ("file", "input_file")


class MarkedText(NamedTuple):
    """The text of a message, and the places up to which it is to be kept."""

    text: str
    kept: tuple[KeptPlace, ...] = ()


def read_content(
    item: Fields,
    name: str = "content",
    *,
    images: ImageParser,
    may_hold_unseen: bool,
    keep_s: int | None = None,
) -> MarkedText:
    """Return a string, or an array of parts joined.

    Args:
        images: reads the images among them.
        may_hold_unseen: replace parts that the model cannot see by a note; otherwise refuse them. Clients
            would send a refused part again in every turn, so only those of the current question are.
        keep_s: seconds for which places are kept whose marks do not say.

    Raises:
        InvalidRequest: names a part that is malformed or refused.
    """
    value = item.value(name)
    if value is None:
        return MarkedText("")
    if isinstance(value, str):
        return MarkedText(value)
    if not isinstance(value, list):
        raise item.expected(name, "a string or an array of parts")
    parts: list[str] = []
    for index, part in enumerate(value):
        where = f"{name}[{index}]"
        if isinstance(part, str):
            parts.append(part)
        elif isinstance(part, dict):
            parts.append(_part(Fields(part, item.path_of(where)), images, may_hold_unseen=may_hold_unseen))
        else:
            raise item.fail(where, f"must be a string or an object, not {type_name(part)}")
    marks = [seconds_of(part, keep_s) if isinstance(part, dict) else None for part in value]
    return MarkedText("".join(parts), places(parts, marks))


def _part(part: Fields, images: ImageParser, *, may_hold_unseen: bool) -> str:
    kind = part.required_text("type")
    if kind == TOOL_REFERENCE:
        return ""
    if kind in TEXT_PARTS:
        return part.given_text(TEXT_PARTS[kind])
    if kind in IMAGE_PARTS:
        return images.read(part, is_refused=not may_hold_unseen)
    if kind in _FILE_PARTS:
        return _file(part, is_refused=not may_hold_unseen)
    if may_hold_unseen:
        return text_or_note(part, kind)
    raise part.fail("type", f"is {kind!r}; this model reads text")


def text_or_note(part: Fields, kind: str) -> str:
    """Return the text of an unknown part, or a note that the part was there."""
    text = part.value("text")
    return text if isinstance(text, str) else f"[{kind}: this model cannot read it]"


def _file(part: Fields, *, is_refused: bool) -> str:
    if is_refused:
        raise InvalidRequest(f"'{part.path}' is a file, and this model cannot read files.", param=part.path)
    return UNSEEN_FILE


def begins_reply(messages: Sequence[Message]) -> bool:
    """Return whether a reply can go on from the last message: it is the model's, with text and no calls."""
    last = messages[-1]
    return len(messages) > 1 and last.role == "assistant" and bool(last.content) and not last.tool_calls


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
