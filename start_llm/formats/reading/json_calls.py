"""Parses calls whose arguments are a JSON object.

A call is emitted when its object is complete. Only then is it known to be valid. A malformed call must go
back into the text, which is impossible once the call has been emitted. Of a name that stands twice in an
object the last value counts, as parsers have it; between tags it is the first (`tagged`).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, repeat
from typing import NoReturn, Protocol, cast

from start_llm.core.chat import Json
from start_llm.formats.reading.almost_json import almost_json
from start_llm.formats.reading.block import Block, BlockReader, Step, compiled
from start_llm.formats.reading.json_text import DECODER, is_strict, parsed, with_whole_characters, written
from start_llm.formats.reading.parts import ParsedArguments, ParsedEnd, ParsedName, Part
from start_llm.formats.reading.schema import Tools, decode

_OUTSIDE_STRINGS = re.compile(r'["{}\[\]]|[^\s\w+\-.,:]')
_INSIDE = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}
_IN_COMMENT = {
    "/": re.compile(r"."),
    "//": re.compile(r"\n"),
    "/*": re.compile(r"\*"),
    "*": re.compile(r"[^*]"),
}
_COMMENTS = {("/", "/"): "//", ("/", "*"): "/*", ("//", "\n"): "", ("/*", "*"): "*", ("*", "/"): ""}
"""What a comment goes on as: the part that it is in, and the next character that matters."""
_NOWHERE_OUTSIDE_STRINGS = re.compile(r"[^\s\w+\-.,:{}\[\]]")
_ESCAPE = re.compile(r"\\.", re.DOTALL)
STEPS = {"{": 1, "[": 1, "}": -1, "]": -1}
_SPACE = re.compile(r"\s*")
_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
_BESIDE_ARGUMENTS = frozenset({*_NAMES, "id", "tool_call_id", "type"})
_FUNCTION = "function"
_NO_ARGUMENTS = ("null", '""')


class ObjectScanner(Protocol):
    """Finds the end of an object in text that arrives in pieces."""

    def feed(self, text: str) -> int | None:
        """Return the length of the object from its first character once it is complete, else None.

        Raises:
            ValueError: the text is not an object.
        """
        ...


def depth_after(structure: str, depth: int) -> int:
    """Return the bracket depth after a text without strings, or 0 if it closes the outermost bracket."""
    closing = structure.count("}") + structure.count("]")
    if closing < depth:
        return depth + structure.count("{") + structure.count("[") - closing
    depths = list(accumulate(map(STEPS.get, structure, repeat(0)), initial=depth))
    return 0 if 0 in depths[1:] else depths[-1]


class JsonScanner:
    """Finds the end of a JSON object or array, also of one with single quotes or comments.

    Skips a piece at once if the end is not in it. Only the piece with the end is read step by step.

    Attributes:
        stopped_at: where the text stopped to be an object, once `feed` has raised.
    """

    def __init__(self) -> None:
        self._length = 0
        self._depth = 0
        self._inside = ""
        self._escaped = False
        self.stopped_at = 0

    @property
    def is_in_text(self) -> bool:
        """True inside of a string or a comment."""
        return bool(self._inside)

    def feed(self, text: str) -> int | None:
        if not text or self._pass_over(text):
            self._length += len(text)
            return None
        place = 0
        while place < len(text):
            place = self._skip(text, place)
            if not self._depth:
                return self._length + place
        self._length += len(text)
        return None

    def _skip(self, text: str, place: int) -> int:
        if self._inside in _INSIDE:
            return self._skip_string(text, place)
        return self._skip_comment(text, place) if self._inside else self._skip_structure(text, place)

    def _pass_over(self, text: str) -> bool:
        """Consume the text and return True if the object goes on to its end."""
        if self._inside not in ("", '"'):
            return False
        if self._escaped:
            text = " " + text[1:]
        # An escaped quote ends no string. The backslash stays, because it is an error outside of a string.
        parts = _ESCAPE.sub(r"\\ ", text).split('"') if "\\" in text else text.split('"')
        structure = " ".join(parts[bool(self._inside) :: 2])
        depth = depth_after(structure, self._depth)
        if not depth or _NOWHERE_OUTSIDE_STRINGS.search(structure):
            return False
        self._depth = depth
        self._inside = '"' if (len(parts) % 2 == 0) ^ bool(self._inside) else ""
        self._escaped = parts[-1].endswith("\\")
        return True

    def _skip_string(self, text: str, place: int) -> int:
        if self._escaped:
            self._escaped = False
            return place + 1
        match = _INSIDE[self._inside].search(text, place)
        if match is None:
            return len(text)
        self._escaped = match[0] == "\\"
        self._inside = self._inside if self._escaped else ""
        return match.end()

    def _skip_comment(self, text: str, place: int) -> int:
        match = _IN_COMMENT[self._inside].search(text, place)
        if match is None:
            return len(text)
        if self._inside == "/" and match[0] not in "/*":
            self._stop(place)
        self._inside = _COMMENTS.get((self._inside, match[0]), "/*")
        return match.end()

    def _skip_structure(self, text: str, place: int) -> int:
        match = _OUTSIDE_STRINGS.search(text, place)
        if match is None:
            return len(text)
        match match[0]:
            case '"' | "'" | "/":
                self._inside = match[0]
            case bracket if bracket in STEPS:
                self._depth += STEPS[bracket]
            case _:
                self._stop(match.start())
        return match.end()

    def _stop(self, place: int) -> NoReturn:
        self.stopped_at = self._length + place
        raise ValueError("a character stands outside a string")


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A complete call. `arguments` is JSON."""

    name: str
    arguments: str


def named_call(text: str, *, may_lack_arguments: bool) -> ParsedCall:
    """Parse `{"name": …, "arguments": {…}}` and keep the arguments as they were written.

    A model that copies the form of its tools puts that object, or the name, under `function`.

    Raises:
        ValueError: the text has another shape, or is the definition of a tool.
    """
    members = dict(_members(text))
    function = members.pop(_FUNCTION, "")
    if function.startswith("{") and members.keys() <= _BESIDE_ARGUMENTS.difference(_NAMES):
        members = dict(_members(function))
    elif function:
        members.setdefault(_NAMES[0], function)
    if "description" in members:
        raise ValueError("this defines a tool")
    name = parsed(next((members[key] for key in _NAMES if key in members), ""))
    if not isinstance(name, str):
        raise ValueError("the name is no text")  # noqa: TRY004 - whoever reads it catches ValueError
    return ParsedCall(name, arguments_of(_raw_arguments(members, may_lack=may_lack_arguments)))


def _raw_arguments(members: Mapping[str, str], *, may_lack: bool) -> str:
    arguments = next((members[key] for key in _ARGUMENTS if key in members), None)
    if arguments is None and not (may_lack and members.keys() <= _BESIDE_ARGUMENTS):
        raise ValueError("there are no arguments, or they stand beside the name")
    return "{}" if arguments is None or arguments in _NO_ARGUMENTS else arguments


def arguments_of(text: str) -> str:
    """Return the arguments as JSON: unchanged if valid, else rewritten.

    Raises:
        ValueError: the arguments are not an object.
    """
    value = parsed(text)
    if isinstance(value, str):
        text = value  # an object inside a JSON string
        value = parsed(text)
    if not isinstance(value, dict):
        raise ValueError("the arguments are no object")  # noqa: TRY004 - as above
    return text if is_strict(text) else written(value)


def _members(text: str) -> list[tuple[str, str]]:
    """Return the names and raw values of an object's members."""
    members: list[tuple[str, str]] = []
    place = _after_space(text, 1)
    while text[place : place + 1] != "}":
        if members:
            place = _after_comma(text, place)
        key, place = cast("tuple[Json, int]", DECODER.raw_decode(text, place))
        place = _after_space(text, place)
        if not isinstance(key, str) or text[place : place + 1] != ":":
            raise ValueError("a member has no name")
        start = _after_space(text, place + 1)
        _, end = DECODER.raw_decode(text, start)
        members.append((key, text[start:end]))
        place = _after_space(text, end)
    return members


def _after_comma(text: str, place: int) -> int:
    if text[place : place + 1] != ",":
        raise ValueError("members are not separated")
    return _after_space(text, place + 1)


def _after_space(text: str, place: int) -> int:
    match = _SPACE.match(text, place)
    return match.end() if match else place


@dataclass(frozen=True, slots=True, kw_only=True)
class Objects(Block):
    """Calls that are objects. If the head names the tool, the object contains only the arguments.

    Attributes:
        span: creates a scanner that finds the end of an object.
        arguments: converts an object that contains only arguments to JSON.
        may_lack_arguments: an object with a name and no arguments is a call without arguments.
    """

    span: Callable[[], ObjectScanner] = JsonScanner
    arguments: Callable[[str], str] = arguments_of
    may_lack_arguments: bool = True


class ObjectReader(BlockReader):
    """Parses blocks of calls that are objects."""

    def __init__(self, objects: Objects, tools: Tools) -> None:
        super().__init__(objects, tools)
        self._objects = objects
        self._name: str | None = None
        self._span = objects.span()
        self._pieces: list[str] = []

    def _begin_arguments(self, name: str | None) -> Step:
        self._name = name
        self._span = self._objects.span()
        self._pieces = []
        return self._read_object

    def _read_object(self, parts: list[Part]) -> bool:
        piece, self._buffer = self._buffer, ""
        self._pieces.append(piece)
        try:
            end = self._span.feed(piece)
        except ValueError:
            return self._stop_object()
        if end is None:
            return False
        text = "".join(self._pieces)
        if text[0] == "{" and text[end - 1] == "]":
            return self._leave_open(text, end - 1)
        self._buffer = text[end:]
        self._end_object(text[:end], parts)
        return True

    def _stop_object(self) -> bool:
        """Leave an object before a character that no object has. Its last brackets may be missing."""
        if not isinstance(self._span, JsonScanner):
            self._give_up()
            return False
        return self._leave_open("".join(self._pieces), self._span.stopped_at)

    def _leave_open(self, text: str, end: int) -> bool:
        self._pieces, self._buffer = [text[:end]], text[end:]
        self._step = self._read_missing_end
        return True

    def _read_missing_end(self, parts: list[Part]) -> bool:
        """Read what follows an object without its last brackets. Only the block's end makes it a call."""
        end = compiled(self._objects.block_end).match(self._buffer, partial=True)
        if end is not None and end.partial:
            return False
        call = None if end is None else self._almost_call("".join(self._pieces))
        if call is None:
            self._give_up()
            return False
        self._give_call(call, parts)
        return True

    def _close_call(self) -> list[Part]:
        """Close an object that lacks its last brackets where the model ended its reply."""
        parts: list[Part] = []
        is_text = not isinstance(self._span, JsonScanner) or self._span.is_in_text
        if is_text or self._step not in (self._read_object, self._read_missing_end):
            return parts
        if call := self._almost_call("".join(self._pieces)):
            self._give_call(call, parts)
            self._finish("")
        return parts

    def _end_object(self, text: str, parts: list[Part]) -> None:
        call = self._call(text) or self._almost_call(text)
        if call is None:
            self._end_malformed(text, parts)
        elif (name := self._meant(call.name)) is None:
            self._refuse(parts)
        else:
            self._give_call(replace(call, name=name), parts)

    def _end_malformed(self, text: str, parts: list[Part]) -> None:  # noqa: ARG002 - for formats that mend it
        self._refuse(parts)

    def _give_call(self, call: ParsedCall, parts: list[Part]) -> None:
        arguments = with_whole_characters(call.arguments)
        self.was_repaired |= arguments != call.arguments
        self._settle()
        parts += [ParsedName(call.name), ParsedArguments(arguments), ParsedEnd()]
        self._end_call()

    def _call(self, text: str) -> ParsedCall | None:
        """Return the call, or None if the text is not JSON or not shaped like a call."""
        try:
            if self._name is None:
                return named_call(text, may_lack_arguments=self._objects.may_lack_arguments)
            return ParsedCall(self._name, self._objects.arguments(text))
        except (ValueError, RecursionError):
            return None

    def _almost_call(self, text: str) -> ParsedCall | None:
        """Return the call of an offered tool that a text which is almost JSON can only mean."""
        try:
            json = almost_json(text)
            if self._name is None:
                call = named_call(json, may_lack_arguments=self._objects.may_lack_arguments)
            else:
                call = ParsedCall(self._name, arguments_of(json))
        except (ValueError, RecursionError):
            return None
        name = self._meant(call.name)
        self.was_repaired |= name is not None
        return None if name is None else replace(call, name=name)


class TypedObjectReader(ObjectReader):
    """Parses calls in which a value between quotes may be of any type, as templates write it."""

    def _call(self, text: str) -> ParsedCall | None:
        call = self._read_call(text)
        return call and self._with_types(call)

    def _with_types(self, call: ParsedCall) -> ParsedCall:
        arguments = cast("dict[str, Json]", parsed(call.arguments))
        name = self._tools.meant(call.name) or call.name
        values = {key: self._typed(name, key, value) for key, value in arguments.items()}
        return call if values == arguments else ParsedCall(call.name, written(values))

    def _read_call(self, text: str) -> ParsedCall | None:
        return super()._call(text)

    def _typed(self, tool: str, argument: str, value: Json) -> Json:
        """Return the value that a text stands for, if the schema does not allow texts."""
        types = self._tools.types(tool, argument)
        is_other = isinstance(value, str) and types and "string" not in types
        return decode(value, types) if isinstance(value, str) and is_other else value
