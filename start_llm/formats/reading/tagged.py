"""Parses formats that put each argument between tags. Few of them state an argument's type.

    HEAD                 <function=read>                read
    KEY value VALUE_END  <parameter=path>a</parameter>  <arg_key>path</arg_key><arg_value>a</arg_value>
    END                  </function>                    </tool_call>

A value ends at a VALUE_END that a KEY or an END follows. Any other VALUE_END is part of the value. So after
the first KEY no text is malformed, and arguments are streamed as they arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from start_llm.core.chat import Json
from start_llm.core.markers import longest_beginning
from start_llm.formats.reading.block import Block, BlockReader, Step, compiled
from start_llm.formats.reading.json_text import written
from start_llm.formats.reading.parts import ParsedArguments, ParsedEnd, ParsedName, Part
from start_llm.formats.reading.schema import TEXT, Shape, Tools, decode, is_text

type Padding = Literal["never", "always", "told"]


def _by_types(raw: str, shape: Shape) -> Json:
    return decode(raw, shape.types)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags(Block):
    """The grammar of one format, as regular expressions except for `value_end`.

    Attributes:
        key: the start of an argument; group `key` is its name, group `type` the type that the model states.
        value_end: literal text, with `KEY` for the argument's name.
        end: the end of a call.
        text_type: the stated type of a text; a value with any other stated type is JSON.
        padding: a newline on each side of a value is part of the format; `told`: only if one precedes it.
        wrapper: literal texts around a value that contains markup, such as CDATA.
        nested: prefixes of the tags of an array's or object's parts: of all tags, and of closing tags.
        decode: converts the text of a value that is not plain text.
    """

    key: str
    value_end: str
    end: str
    text_type: str = ""
    padding: Padding = "never"
    wrapper: tuple[str, str] | None = None
    nested: tuple[str, str] | None = None
    decode: Callable[[str, Shape], Json] = _by_types


class TaggedReader(BlockReader):
    """Parses blocks of one `Tags` grammar."""

    def __init__(self, tags: Tags, tools: Tools) -> None:
        super().__init__(tags, tools)
        self._tags = tags
        self._follow = compiled(f"(?:{tags.key}|{tags.end})")
        self._end = compiled(tags.end)
        self._name = ""
        self._is_offered = False
        self._arguments = 0
        self._value: _Value = _Text("", "never")

    def _begin_arguments(self, name: str | None) -> Step:
        self._name = name or ""
        self._is_offered = self._name in self._tools
        self._arguments = 0
        return self._read_argument

    def _read_argument(self, parts: list[Part]) -> bool:
        match = self._match(self._follow)
        if match is None:
            return False
        if match["key"] is not None:
            self._begin_value(match["key"], match.groupdict().get("type"), parts)
        elif self._is_offered:
            parts += self._last_parts()
            self._end_call()
        else:
            self._refuse(parts)
        return True

    def _begin_value(self, key: str, stated: str | None, parts: list[Part]) -> None:
        key, opening = self._tags.unescape(key), ", " if self._arguments else "{"
        self._give(parts, f"{opening}{written(key)}: ")
        self._arguments += 1
        self._value = self._new_value(key, stated)
        self._step = self._read_wrapper if self._tags.wrapper else self._read_value

    def _give(self, parts: list[Part], text: str) -> None:
        """Emit a fragment of the arguments; the first settles the call. Emit nothing for an unknown tool."""
        if not self._is_offered:
            return
        if not self._arguments:
            self._settle()
            parts.append(ParsedName(self._name))
        if text:
            parts.append(ParsedArguments(text))

    def _stated(self, stated: str, types: frozenset[str]) -> Shape:
        """Return the shape for a type that the model states. It overrides a schema that allows text."""
        if stated != self._tags.text_type:
            return Shape({"type": [*(types - TEXT)]}, {})
        return Shape({"type": [*(TEXT if types >= TEXT or not types else types)]}, {})

    def _new_value(self, key: str, stated: str | None) -> _Value:
        shape = self._tools.shape(self._name, key)
        shape = shape if stated is None else self._stated(stated, shape.types)
        end = self._tags.value_end.replace("KEY", key)
        if is_text(shape.types):
            return _Text(end, self._tags.padding)
        return _Typed(end, self._tags, shape)

    def _read_wrapper(self, parts: list[Part]) -> bool:  # noqa: ARG002 - the signature of a step
        """Check the first characters of the value for a wrapper."""
        opening, closing = self._tags.wrapper or ("", "")
        if len(self._buffer) < len(opening) and opening.startswith(self._buffer):
            return False
        if self._buffer.startswith(opening):
            self._buffer = self._buffer[len(opening) :]
            self._value.end = closing + self._tags.value_end
        self._step = self._read_value
        return True

    def _read_value(self, parts: list[Part]) -> bool:
        end, after = self._find_value_end()
        text = self._value.take(self._buffer[:end], is_last=after is not None)
        self._give(parts, text)
        self._buffer = self._buffer[end if after is None else after :]
        if after is None:
            return False
        self._step = self._read_argument
        return True

    def _find_value_end(self) -> tuple[int, int | None]:
        """Return the end of the certain value text, and the index after the end marker or None."""
        marker, depth, place = self._value.end, 0, 0
        start = self._buffer.find(marker)
        while start >= 0:
            depth, place = depth + self._value.levels(self._buffer[place:start]), start
            after = start + len(marker)
            match = self._follow.match(self._buffer, after, partial=True)
            if match is not None and self._value.depth + depth <= 0:
                return start, None if match.partial else after
            start = self._buffer.find(marker, after)
        return len(self._buffer) - longest_beginning(self._buffer, (marker,)), None

    def _close_call(self) -> list[Part]:
        """Close the call if only closing tags are missing. Otherwise the call stays open."""
        parts: list[Part] = []
        after = self._buffer
        if self._step == self._read_value and after.startswith(self._value.end):
            parts.append(ParsedArguments(self._value.take("", is_last=True)))
            after = after.removeprefix(self._value.end)
        elif self._step != self._read_argument:
            return []
        if not self._is_offered or self._end.fullmatch(after, partial=True) is None:
            return []
        self._finish("")
        return [*parts, *self._last_parts()]

    def _last_parts(self) -> list[Part]:
        parts: list[Part] = []
        self._give(parts, "}" if self._arguments else "{}")
        return [*parts, ParsedEnd()]


class _Value(Protocol):
    """Converts one argument value to JSON.

    Attributes:
        end: literal text that ends the value.
        depth: number of open nested elements in the text taken so far.
    """

    end: str
    depth: int

    def levels(self, text: str) -> int:
        """Return how many more elements begin in the text than end."""
        ...

    def take(self, text: str, *, is_last: bool) -> str:
        """Return the JSON that a piece of the value adds."""
        ...


class _Text:
    """A text value, streamed as it arrives."""

    def __init__(self, end: str, padding: Padding) -> None:
        self.end = end
        self.depth = 0
        self._padding: Padding = padding
        self._held = ""
        self._begun = False

    def levels(self, text: str) -> int:  # noqa: ARG002 - a text has no parts
        return 0

    def take(self, text: str, *, is_last: bool) -> str:
        text = self._held + text
        opening = ""
        if not self._begun:
            if not text and not is_last:
                return ""
            opening, self._begun = '"', True
            self._padding = _padding_of(text, self._padding)
            text = text.removeprefix("\n") if self._padding == "always" else text
        # A newline at the end may belong to the format.
        self._held = "\n" if self._padding == "always" and text.endswith("\n") else ""
        ready = written(text[: len(text) - len(self._held)])[1:-1]
        return opening + ready + ('"' if is_last else "")


class _Typed:
    """Any other value, emitted when complete."""

    def __init__(self, end: str, tags: Tags, shape: Shape) -> None:
        self.end = end
        self.depth = 0
        self._tags = tags
        self._shape = shape
        self._pieces: list[str] = []

    def levels(self, text: str) -> int:
        if self._tags.nested is None:
            return 0
        every, closing = self._tags.nested
        return text.count(every) - 2 * text.count(closing)

    def take(self, text: str, *, is_last: bool) -> str:
        self.depth += self.levels(text)
        self._pieces.append(text)
        if not is_last:
            return ""
        raw = "".join(self._pieces)
        if _padding_of(raw, self._tags.padding) == "always":
            raw = raw.removeprefix("\n").removesuffix("\n")
        return written(self._tags.decode(raw, self._shape))


def _padding_of(value: str, padding: Padding) -> Padding:
    """Resolve `told` to "always" or "never" from the start of the value."""
    if padding != "told":
        return padding
    return "always" if value.startswith("\n") else "never"
