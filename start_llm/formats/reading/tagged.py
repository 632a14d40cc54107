"""Parses formats that put each argument between tags. Few of them state an argument's type.

    HEAD                 <function=read>                read
    KEY value VALUE_END  <parameter=path>a</parameter>  <arg_key>path</arg_key><arg_value>a</arg_value>
    END                  </function>                    </tool_call>

A value ends at a VALUE_END that a KEY or an END follows, and where the model forgot it (`value_end`). Any
other VALUE_END is part of the value. So after the first KEY no text is malformed, and arguments are streamed
as they arrive. Of an argument that is given twice the first value counts, because it may have gone out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import regex

from start_llm.core.chat import Json
from start_llm.formats.reading.block import Block, BlockReader, Step, compiled
from start_llm.formats.reading.json_text import parsed, with_whole_characters, written
from start_llm.formats.reading.parts import ParsedArguments, ParsedEnd, ParsedName, Part
from start_llm.formats.reading.schema import TEXT, Shape, Tools, decode
from start_llm.formats.reading.value_end import EndFinder, TagPatterns, ValueOf

_ALL = frozenset({"arguments", "parameters"})
"""Names under which models write all arguments as one object."""
_SPACE = r"\s{0,64}"

type Padding = Literal["never", "always", "detected"]
_ENDS = {"": (), "\n": ("\n",), "\r\n": ("\r\n", "\n", "\r")}
"""What may be padding at the end of a value, by the line break of its padding."""


def _by_types(raw: str, shape: Shape) -> Json:
    return decode(raw, shape.types)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags(Block):
    """The grammar of one format, as regular expressions except for `value_end`.

    Attributes:
        key: the start of an argument; group `key` is its name, group `type` the type that the model states.
        value_end: literal text, with `KEY` for the argument's name.
        another: the start of another call up to its arguments, which a value may end before; group `tool` is
            its name; matches nothing by default.
        has_bare_names: a name without arguments may be any word, so only that of an offered tool is a call.
        has_lines: the tags of a call stand at the start of lines.
        text_type: the stated type of a text; a value with any other stated type is JSON.
        padding: a newline on each side of a value is part of the format; `detected`: only if one precedes it.
            Both are line ends of Windows if the first one is.
        wrapper: literal texts around a value that contains markup, such as CDATA.
        nested: prefixes of the tags of an array's or object's parts: of all tags, and of closing tags.
        decode: converts the text of a value that is not plain text.
    """

    key: str
    value_end: str
    end: str
    another: str = r"(?!)(?P<tool>)"
    has_bare_names: bool = False
    has_lines: bool = True
    text_type: str = ""
    padding: Padding = "never"
    wrapper: tuple[str, str] | None = None
    nested: tuple[str, str] | None = None
    decode: Callable[[str, Shape], Json] = _by_types

    @property
    def in_value(self) -> TagPatterns:
        """The patterns of the tags that end a value."""
        key, end = self.key.removeprefix(_SPACE), self.end.removeprefix(_SPACE)
        return TagPatterns(
            key=key,
            end=end,
            tail=rf"{end}(?:{self.block_end})?\s*",
            call=rf"(?:{self.another}){_SPACE}(?:{key}|{end})",
            has_lines=self.has_lines,
        )


class TaggedReader(BlockReader):
    """Parses blocks of one `Tags` grammar."""

    def __init__(self, tags: Tags, tools: Tools) -> None:
        super().__init__(tags, tools)
        self._tags = tags
        self._follow = compiled(f"(?:{tags.key}|{tags.end})")
        self._key_again = compiled(tags.key)
        self._end = compiled(tags.end)
        self._another = compiled(rf"\s*(?:{tags.another})")
        self._name = ""
        self._is_offered = False
        # Of a tool that is not offered: a call only if it is whole.
        self._waiting: list[Part] | None = None
        self._given: set[str] = set()
        self._label = ""
        self._arguments = 0
        self._begin_value("", None)

    def _begin_arguments(self, name: str | None) -> Step:
        meant = self._meant(name or "")
        self._name, self._is_offered = meant or "", meant is not None and meant in self._tools
        self._waiting = None if meant is None or self._is_offered else []
        self._given = set()
        self._arguments = 0
        return self._read_argument

    def _read_argument(self, parts: list[Part]) -> bool:
        if self._is_settled and not self._follow.match(self._buffer, partial=True):
            return self._end_without_tag(parts)
        match = self._match(self._follow)
        if match is None:
            return False
        if match["key"] is not None:
            self._begin_value(self._tags.unescape(match["key"]), match.groupdict().get("type"))
            self._step = self._read_key_again
        elif self._may_be_call:
            parts += self._last_parts()
            self._end_call()
        else:
            self._refuse(parts)
        return True

    def _end_without_tag(self, parts: list[Part]) -> bool:
        """End a call behind a value that has ended for certain."""
        self.was_repaired = True
        parts += self._last_parts()
        self._finish(self._buffer)
        return False

    def _read_key_again(self, parts: list[Part]) -> bool:  # noqa: ARG002 - the signature of a step
        """Drop the tag of an argument that the model wrote twice. Parts of a value may have such tags."""
        match = None if self._tags.nested else self._key_again.match(self._buffer, partial=True)
        if match is not None and match.partial:
            return False
        if match is not None and self._tags.unescape(match["key"]) == self._key:
            self.was_repaired = True
            self._buffer = self._buffer[match.end() :]
            return True
        self._step = self._read_wrapper if self._tags.wrapper else self._read_value
        return True

    @property
    def _may_be_call(self) -> bool:
        """True if a call that ends here goes out."""
        is_named = bool(self._waiting) or not self._tags.has_bare_names
        return self._is_offered or (self._waiting is not None and is_named)

    def _begin_value(self, key: str, stated: str | None) -> None:
        self._key = key
        self._is_again = key in self._given
        self.was_repaired |= self._is_again
        declared = self._tools.arguments(self._name)
        self._is_all = key in _ALL and bool(declared) and key not in declared
        self._given |= set() if self._is_all else {key}
        self._label = f"{written(key)}: "
        self._value = self._new_value(key, stated)
        self._ends = self._end_finder()

    def _end_finder(self, wrapper_end: str = "") -> EndFinder:
        marker = regex.escape(self._value.end, literal_spaces=True)
        if wrapper_end:
            marker = rf"{regex.escape(wrapper_end)}(?:{marker}|(?={self._follow.pattern}))"
        value = ValueOf(
            marker=marker,
            is_due=self._is_due,
            is_offered=self._tools.__contains__,
            levels=self._value.levels,
            is_wrapped=bool(wrapper_end),
        )
        return EndFinder(self._tags.in_value, value)

    def _is_due(self, key: str) -> bool:
        name = self._tags.unescape(key)
        return name not in self._given and name in self._tools.arguments(self._name)

    def _give_value(self, parts: list[Part], text: str) -> None:
        """Emit a fragment of a value. Its name waits for the first, in case the reply ends before."""
        if not text or self._is_again:
            return
        if not self._label:
            self._give(parts, text)
        elif self._is_all and text.startswith("{"):
            self.was_repaired = True
            self._give_argument(parts, self._without_given(text)[1:-1])
        else:
            self._given.add(self._key)
            self._give_argument(parts, self._label + text)

    def _without_given(self, arguments: str) -> str:
        """Return an object of arguments without those that the call has already."""
        members = cast("dict[str, Json]", parsed(arguments))
        new = {name: value for name, value in members.items() if name not in self._given}
        self._given |= new.keys()
        return arguments if len(new) == len(members) else written(new)

    def _give_argument(self, parts: list[Part], text: str) -> None:
        self._label = ""
        if text:
            self._give(parts, f"{', ' if self._arguments else '{'}{text}")
            self._arguments += 1

    def _give(self, parts: list[Part], text: str) -> None:
        """Emit a fragment of the arguments; the first settles the call. Those of an unknown tool wait."""
        if self._is_offered and not self._arguments:
            self._settle()
        whole = with_whole_characters(text)
        self.was_repaired |= whole != text
        given = parts if self._is_offered else self._waiting
        if given is not None:
            given += [] if self._arguments else [ParsedName(self._name)]
            given += [ParsedArguments(whole)] if whole else []

    def _stated(self, stated: str, types: frozenset[str]) -> Shape:
        """Return the shape for a type that the model states. It overrides a schema that allows text."""
        if stated != self._tags.text_type:
            return Shape({"type": [*(types - TEXT)]}, {})
        return Shape({"type": [*(TEXT if types >= TEXT or not types else types)]}, {})

    def _new_value(self, key: str, stated: str | None) -> _Value:
        shape = self._tools.shape(self._name, key)
        shape = shape if stated is None else self._stated(stated, shape.types)
        end = self._tags.value_end.replace("KEY", key)
        if shape.types == TEXT:
            return _Text(end, self._tags.padding)
        return _Typed(end, self._tags, shape)

    def _read_wrapper(self, parts: list[Part]) -> bool:  # noqa: ARG002 - the signature of a step
        """Check the first characters of the value for a wrapper."""
        opening, closing = self._tags.wrapper or ("", "")
        if len(self._buffer) < len(opening) and opening.startswith(self._buffer):
            return False
        if self._buffer.startswith(opening):
            self._buffer = self._buffer[len(opening) :]
            self._ends = self._end_finder(closing)
        self._step = self._read_value
        return True

    def _read_value(self, parts: list[Part]) -> bool:
        end, after = self._ends.find(self._buffer)
        self.was_repaired |= self._ends.was_forgotten
        self._give_value(parts, self._value.take(self._buffer[:end], is_last=after is not None))
        self._drop(end if after is None else after)
        if after is None:
            return False
        self._step = self._read_argument
        return True

    def _drop(self, length: int) -> None:
        self._buffer = self._buffer[length:]
        self._ends.forget(length)

    def _close_call(self) -> list[Part]:
        """Finish a call of which only closing tags are missing, and one of which something has gone out."""
        parts: list[Part] = []
        if self._is_in_value:
            rest, is_closed = self._close_value(parts), False
        else:
            rest, is_closed = self._buffer, self._end.fullmatch(self._buffer, partial=True) is not None
            self.was_repaired |= not is_closed
        if self._is_offered and (self._is_settled or is_closed):
            parts += self._last_parts()
            self._close_block(rest, parts)
        return parts

    def _cut_call(self) -> list[Part]:
        parts: list[Part] = []
        if self._is_in_value:
            held = self._ends.held(self._buffer)
            self._give_value(parts, self._value.take(held, is_last=False))
        return parts

    @property
    def _is_in_value(self) -> bool:
        return self._step in (self._read_value, self._read_wrapper, self._read_key_again)

    def _close_value(self, parts: list[Part]) -> str:
        """End the value where the reply ended, and return the text after it.

        A value is dropped if nothing of it has gone out and it is blank, or is no value of its type.
        """
        opening = self._tags.wrapper[0] if self._tags.wrapper else ""
        if self._step != self._read_value and opening.startswith(self._buffer):
            self._buffer = ""  # half the start of a wrapper
        self._ends.find(self._buffer)
        end, after = self._ends.last(self._buffer)
        is_ended = self._ends.has_ended
        self.was_repaired |= not is_ended
        text = self._value.take(self._buffer[:end], is_last=True)
        if is_ended or not self._label or (self._value.fits and not self._ends.is_blank):
            self._give_value(parts, text)
        return self._buffer[after:]

    def _close_block(self, rest: str, parts: list[Part]) -> None:
        """Read what follows a call that ended without its tags: the other calls of its block, or text."""
        end = self._end.match(rest)
        if end is None:
            self._finish(rest if self._another.match(rest) else "")
            return
        self._buffer = rest[end.end() :]
        self._end_call()
        while self.state == "reading" and self._step(parts):
            pass
        parts += self.close(complete=True)

    def _last_parts(self) -> list[Part]:
        parts: list[Part] = []
        self._give(parts, "}" if self._arguments else "{}")
        if self._waiting is not None:
            self._settle()
            parts += self._waiting
        return [*parts, ParsedEnd()]


class _Text:
    """Converts a text value to JSON, as it arrives.

    Attributes:
        end: literal text that ends the value.
        fits: the whole value has a type that the schema allows.
    """

    def __init__(self, end: str, padding: Padding) -> None:
        self.end = end
        self.fits = True
        self._padding: Padding = padding
        self._ends: Sequence[str] = ()
        self._held = ""
        self._begun = False
        self._opening = '"'

    def levels(self, text: str) -> int:  # noqa: ARG002 - a text has no parts
        """Return how many more elements begin in the text than end."""
        return 0

    def take(self, text: str, *, is_last: bool) -> str:
        """Return the JSON that a piece of the value adds."""
        text = self._held + text
        if not self._begun:
            self._begun = is_last or text not in ("", "\r")
            if not self._begun:
                self._held = text
                return ""
            line_break = _line_break(text, self._padding)
            text, self._ends = text.removeprefix(line_break), _ENDS[line_break]
        # A newline at the end may belong to the format.
        self._held = next(filter(text.endswith, self._ends), "")
        ready = written(text[: len(text) - len(self._held)])[1:-1]
        if not ready and not is_last:
            return ""
        opening, self._opening = self._opening, ""
        return opening + ready + ('"' if is_last else "")


class _Typed:
    """Converts any other value, when it is complete."""

    def __init__(self, end: str, tags: Tags, shape: Shape) -> None:
        self.end = end
        self.fits = False
        self._tags = tags
        self._shape = shape
        self._pieces: list[str] = []

    def levels(self, text: str) -> int:
        if self._tags.nested is None:
            return 0
        every, closing = self._tags.nested
        return text.count(every) - 2 * text.count(closing)

    def take(self, text: str, *, is_last: bool) -> str:
        self._pieces.append(text)
        if not is_last:
            return ""
        raw = "".join(self._pieces)
        line_break = _line_break(raw, self._tags.padding)
        raw = raw.removeprefix(line_break)
        raw = raw.removesuffix(next(filter(raw.endswith, _ENDS[line_break]), ""))
        value = self._tags.decode(raw, self._shape)
        self.fits = not isinstance(value, str) or not self._shape.types or "string" in self._shape.types
        return written(value)


type _Value = _Text | _Typed


def _line_break(value: str, padding: Padding) -> str:
    """Return the line break of a value's padding, or the empty text if it has none."""
    if padding == "never":
        return ""
    if value.startswith("\r\n"):
        return "\r\n"
    return "\n" if padding == "always" or value.startswith("\n") else ""
