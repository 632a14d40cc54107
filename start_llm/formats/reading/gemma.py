"""Parses objects in Gemma's notation, `{key:<|"|>text<|"|>,number:1}`, with a configurable quote.

What is almost in this notation is read too, where it can mean only one thing.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import regex

from start_llm.core.chat import Json
from start_llm.core.markers import longest_beginning
from start_llm.formats.reading.block import compiled
from start_llm.formats.reading.cursor import Cursor
from start_llm.formats.reading.json_calls import STEPS, Objects, ParsedCall, TypedObjectReader, depth_after
from start_llm.formats.reading.json_text import parsed, written
from start_llm.formats.reading.literals import CONSTANTS
from start_llm.formats.reading.parts import Part
from start_llm.formats.reading.schema import TEXT, Tools

_LITERAL = regex.compile(r"\s*(\"(?:[^\"\\]|\\.)*+\"|[^\s,{}\[\]<>]+)")
_WORDS = regex.compile(r"\s*(?!NaN\b|Infinity\b)([^\W\d_][^,{}\[\]<>:\"]*+)(?=[,}\]])")


class _Patterns(NamedTuple):
    """Patterns of a member's name with its colon, and of a text."""

    key: regex.Pattern[str]
    text: regex.Pattern[str]


@cache
def _patterns(quote: str) -> _Patterns:
    mark = regex.escape(quote)
    word = r"[^\s:,{}\[\]<>\"]++"
    key = rf"\s*({word}(?:\s++{word})*+|\"[^\"\\]++\"|{mark}.*?{mark})\s*:"
    text = rf"\s*{mark}(.*?){mark}"
    return _Patterns(regex.compile(key, regex.DOTALL), regex.compile(text, regex.DOTALL))


class LiteralScanner:
    """Finds the end of an object in Gemma's notation."""

    def __init__(self, quote: str) -> None:
        self._quote = quote
        self._structure = regex.compile(rf"{regex.escape(quote)}|[{{}}\[\]]")
        self._held = ""
        self._length = 0
        self._depth = 0
        self._in_text = False

    def feed(self, text: str) -> int | None:
        buffer = self._held + text
        keep = longest_beginning(buffer, (self._quote,))
        ready, self._held = buffer[: len(buffer) - keep], buffer[len(buffer) - keep :]
        parts = ready.split(self._quote)
        depth = depth_after(" ".join(parts[self._in_text :: 2]), self._depth)
        if not depth:
            return self._length + self._end(ready)
        self._depth = depth
        self._in_text ^= len(parts) % 2 == 0
        self._length += len(ready)
        return None

    def _end(self, text: str) -> int:
        """Return the end of the object. It must lie in this text."""
        tokens = self._structure.finditer(text)
        return next(token.end() for token in tokens if not self._depth_at(token[0]))

    def _depth_at(self, mark: str) -> int:
        if mark == self._quote:
            self._in_text = not self._in_text
        elif not self._in_text:
            self._depth += STEPS[mark]
        return self._depth


def as_json(quote: str, text: str) -> str:
    """Convert an object in Gemma's notation to JSON.

    Raises:
        ValueError: the text is not such an object.
    """
    cursor = GemmaValues(text, quote)
    value = cursor.value()
    if not isinstance(value, dict) or cursor.rest.strip():
        raise ValueError("the arguments are no object")
    return written(value)


class GemmaValues(Cursor):
    """Takes values in Gemma's notation from the front of a text."""

    def __init__(self, text: str, quote: str) -> None:
        super().__init__(text)
        self._quote = quote
        self._patterns = _patterns(quote)

    def value(self) -> Json:
        if self.takes("{"):
            return dict(self.items("}", self._member))
        if self.takes("["):
            return self.items("]", self.value)
        if quoted := self.take(self._patterns.text):
            return quoted[1]
        if words := self.take(_WORDS):  # a text without quotes, which small models forget
            text = words[1].rstrip()
            return CONSTANTS.get(text, text)
        literal = self.take(_LITERAL)
        if literal is None:
            raise ValueError("a value is missing")
        # Templates write what is null as Python does.
        return None if literal[1] == "None" else parsed(literal[1])

    def _member(self) -> tuple[str, Json]:
        return self._key(), self.value()

    def _key(self) -> str:
        key = self.take(self._patterns.key)
        if key is None:
            raise ValueError("a member has no name")
        return key[1].replace(self._quote, "").strip('"')


def gemma_calls(quote: str, mark: str) -> Objects:
    """Return the patterns for one or more `call:NAME{…}` and the mark that ends them."""
    call = r"call:(?P<name>[\w.\-]{1,256})\s{0,64}(?=\{)"
    return Objects(
        head=rf"\s{{0,64}}:?{call}",
        next_call=rf"\s{{0,64}}(?={call})",
        block_end=r"\s{0,64}" + regex.escape(mark),
        span=partial(LiteralScanner, quote),
        arguments=partial(as_json, quote),
    )


_LONGEST = 65_536
"""Characters of an object that is mended."""
_FOLLOW = r"(?=\s*+(?:[,}]|\Z))"
_FOLLOWED = regex.compile(_FOLLOW)
_NOTHING = regex.compile(r"\s*+\Z")
_STRUCTURE = "\"'[{<"


class GemmaReader(TypedObjectReader):
    """Parses calls in Gemma's notation. Malformed ones are mended where the block or the reply ends."""

    def __init__(self, quote: str, mark: str, tools: Tools) -> None:
        super().__init__(gemma_calls(quote, mark), tools)
        self._quote, self._mark = quote, mark
        self._malformed = ""

    def _end_malformed(self, text: str, parts: list[Part]) -> None:  # noqa: ARG002 - what it is shows later
        self._malformed = text
        self._step = self._read_behind_malformed

    def _read_behind_malformed(self, parts: list[Part]) -> bool:
        """Mend an object only if the block ends behind it: its last bracket may be part of a text."""
        end = compiled(self._objects.block_end).match(self._buffer, partial=True)
        if end is not None and end.partial:
            return False
        self._mend(self._malformed if end else "", parts)
        return True

    def _mend(self, text: str, parts: list[Part]) -> None:
        if call := self._mended(text):
            self._give_call(call, parts)
        else:
            self._refuse(parts)

    def _close_call(self) -> list[Part]:
        """Mend an object without an end, up to the mark of its block or the end of the reply."""
        parts: list[Part] = []
        if self._step == self._read_behind_malformed:
            self._mend(self._malformed, parts)
            self._finish("")
        elif self._step == self._read_object:
            text, _, rest = "".join(self._pieces).partition(self._mark)
            if call := self._mended(text):
                self._give_call(call, parts)
                self._finish(rest)
        return parts

    def _mended(self, text: str) -> ParsedCall | None:
        """Return the call of an offered tool that a text which is almost an object can only mean.

        Prose about calls has texts without an end, too, so what is quoted is not mended.
        """
        name = self._name and self._tools.meant(self._name)
        if not (name and name in self._tools and self._tools.is_unquoted) or len(text) > _LONGEST:
            return None
        try:
            value = almost_gemma(self._quote, text, self._tools.arguments(name), partial(self._is_text, name))
        except (ValueError, RecursionError):
            return None
        self.was_repaired = True
        return self._with_types(ParsedCall(name, written(value)))

    def _is_text(self, tool: str, argument: str) -> bool:
        return self._tools.types(tool, argument) == TEXT


def almost_gemma(
    quote: str, text: str, declared: Sequence[str], is_text: Callable[[str], bool]
) -> dict[str, Json]:
    """Return the object that a malformed one means.

    A text may stand in single quotes, with a quote of Gemma's behind them. The last text may lack its quotes,
    or its end, and the object its last brace; a brace belongs to the text if it closes one that opens there.

    Args:
        declared: names of the tool's arguments.
        is_text: tells whether an argument can only be text.

    Raises:
        ValueError: the object is something else, or has several readings.
    """
    return _Malformed(text, quote, declared, is_text).members()


class _Malformed(GemmaValues):
    def __init__(
        self, text: str, quote: str, declared: Sequence[str], is_text: Callable[[str], bool]
    ) -> None:
        super().__init__(text, quote)
        mark = regex.escape(quote)
        names = "|".join(map(regex.escape, declared)) or "(?!)"
        self._is_text = is_text
        self._single = regex.compile(rf"\s*+'(.*?)'(?:{mark})?{_FOLLOW}", regex.DOTALL)
        self._opening = regex.compile(rf"\s*+{mark}")
        self._next = regex.compile(rf",\s*+(?:{names})\s*+:")
        self._is_over = False

    def members(self) -> dict[str, Json]:
        self.need("{")
        members: list[tuple[str, Json]] = []
        while not self._ends():
            if members:
                self.need(",")
                if self._ends():
                    break
            members.append(self._top_member())
        if not members:
            raise ValueError("nothing tells what is missing")
        return dict(members)

    def _ends(self) -> bool:
        if not self._is_over and self.takes("}") and not self.take(_NOTHING):
            raise ValueError("something follows the object")
        return self._is_over or self.take(_NOTHING) is not None

    def _top_member(self) -> tuple[str, Json]:
        key = self._key()
        if single := self.take(self._single):
            return key, single[1]
        place = self._place
        try:
            value = self.value()
        except ValueError:
            value = None
        else:
            if self._is_followed(place):
                return key, value
        self._place = place
        return key, self._malformed_text(key)

    def _is_followed(self, start: int) -> bool:
        """Return True if the value that begins there ends here. A quote may stand behind the last brace."""
        if self._opening.match(self._text, start) and _NOTHING.match(self._text, self._place):
            return False
        return _FOLLOWED.match(self._text, self._place) is not None

    def _malformed_text(self, key: str) -> str:
        """Take a text that lacks a quote. Without the first one the schema has to say that it is text."""
        if self.take(self._opening):
            return self._last_text()
        if not self._is_text(key) or self._text[self._place :].lstrip()[:1] in _STRUCTURE:
            raise ValueError("a value is malformed")
        following = self._next.search(self._text, self._place)
        if following is None:
            return self._last_text()
        if not self._opening.match(self._text, following.end()):
            raise ValueError("another argument, or a part of this text")
        text = self._text[self._place : following.start()]
        self._place = following.start()
        return text

    def _last_text(self) -> str:
        """Take the rest as one text, without the brace of the object."""
        rest = self._text[self._place :].rstrip()
        text = rest.removesuffix(self._quote)
        left_open = text.count("{") - text.count("}")
        if left_open == -1 and text.endswith("}"):
            text = text[:-1].removesuffix(self._quote)
        elif left_open or (text == rest and text.endswith("}")):
            raise ValueError("the text may end elsewhere")
        if not text.strip() or self._quote in text or longest_beginning(text, (self._quote,)) > 1:
            raise ValueError("there is no text, or a part of it")
        self._is_over = True
        self._place = len(self._text)
        return text
