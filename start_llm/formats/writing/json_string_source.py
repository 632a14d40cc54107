"""Translates a client's grammar for a text into one for what a JSON string has between its quotes."""

import json
from collections.abc import Sequence
from functools import lru_cache, partial

import regex

from start_llm.formats.writing.character_classes import (
    RewrittenPattern,
    matches_unescaped,
    special_characters,
)
from start_llm.formats.writing.lark_source import RewrittenSource, UnusableGrammar, pattern_for

_IMPORT = regex.compile(
    r"%import\s+common\s*(?:\.\s*(?P<name>\w+)\s*(?:->\s*(?P<alias>\w+))?|\((?P<names>[^()]*)\))\s*"
)
_COMMON = {
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "ESCAPED_STRING": r'"([^"\\]|\\.)*"',
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
}
"""Those of Lark's common terminals that may match a character that JSON escapes."""
_UNESCAPED = r'[^\x00-\x1f"\\]'


class JsonStringSource(RewrittenSource):
    """The source of a grammar for the same texts, as a JSON string has them.

    Args:
        has_escapes: patterns match escaped characters too.
    """

    def __init__(self, source: str, *, has_escapes: bool) -> None:
        super().__init__(source)
        self._has_escapes = has_escapes

    def _pattern(self, pattern: str, flags: str) -> str:
        of_class = partial(_json_class, has_escapes=self._has_escapes)
        return f"/{RewrittenPattern(pattern, flags, of_class, _json_character).text}/{flags}"

    def _other(self, match: regex.Match[str]) -> str:
        if match["text"] is not None:
            return self._text(match["text"], match["text_flags"])
        if match["range"]:
            return self._range(match["range"])
        if match["negation"]:
            raise UnusableGrammar("'~' in front of a terminal is not supported with this model")
        return self._import(match["import"]) if match["import"] else match[0]

    def _text(self, text: str, flags: str) -> str:
        decoded = _decoded(text)
        if flags:
            return self._pattern(pattern_for(decoded), flags)
        return json.dumps(json.dumps(decoded, ensure_ascii=False)[1:-1], ensure_ascii=False)

    def _import(self, statement: str) -> str:
        match = _IMPORT.match(statement)
        if match is None:
            return statement
        if match["names"] is None:
            return self._common(match["name"], match["alias"])
        return "\n".join(self._common(name.strip(), None) for name in match["names"].split(","))

    def _common(self, name: str, alias: str | None) -> str:
        if name in _COMMON:
            return f"{alias or name}: {self._pattern(_COMMON[name], '')}"
        return f"%import common.{name}{f' -> {alias}' if alias else ''}"

    def _range(self, between: str) -> str:
        low, high = (_decoded(end.strip()) for end in regex.split(r'(?<=")[ \t]*\.\.', between))
        if len(low) != 1 or len(high) != 1:
            raise UnusableGrammar(f"{between} is no range of characters")
        return self._pattern(f"[\\x{{{ord(low):x}}}-\\x{{{ord(high):x}}}]", "")


def _decoded(text: str) -> str:
    """Return the text that a string of Lark stands for."""
    try:
        return json.loads(regex.sub(r"(\\\\)|\\x", lambda match: match[1] or r"\u00", text))
    except ValueError as error:
        raise UnusableGrammar(f"the string {text} is malformed") from error


def _json_character(text: str) -> str:
    """Return an expression for one character, which may be written in any way."""
    special = special_characters(text)
    return _escapes(special) if special else text


@lru_cache(256)
def _json_class(text: str, has_escapes: bool) -> str:
    """Return an expression for a class of characters: those that JSON has as they are, and escapes."""
    ways = [f"[{text}&&{_UNESCAPED}]"] if matches_unescaped(text) else []
    special = special_characters(text)
    if special and (has_escapes or not ways):
        ways.append(_escapes(special))
    return f"(?:{'|'.join(ways)})"


def _escapes(characters: Sequence[str]) -> str:
    """Return an expression for JSON's escapes of these characters, the usual one of each."""
    escapes = [json.dumps(character)[2:-1] for character in characters]
    return rf"(?-i:\\(?:{'|'.join(map(regex.escape, escapes))}))"
