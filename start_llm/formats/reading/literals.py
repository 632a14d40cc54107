"""Parses arrays and objects in Python's notation: `{'a': [True, None]}`."""

from collections.abc import Iterable, Iterator, Mapping

import regex

from start_llm.core.chat import Json
from start_llm.formats.reading.json_text import parsed, written

_DEEPEST = 64
_TOKEN = regex.compile(
    r"""(?P<text>'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+")|(?P<name>\b(?:True|False|None)\b)"""
    r"""|(?P<comma>,\s*+(?=[\]}]))|(?P<other>[^'"])""",
    regex.DOTALL,
)
_ESCAPE = regex.compile(
    r"\\(?:x([\da-fA-F]{2})|u([\da-fA-F]{4})|U(00(?:0[\da-fA-F]|10)[\da-fA-F]{4})|(?P<letter>.))",
    regex.DOTALL,
)
_NAMES: Mapping[str, str] = {"True": "true", "False": "false", "None": "null"}
_LETTERS: Mapping[str, str] = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", "'": "'", '"': '"'}


def literal(text: str) -> Json:
    """Parse an array or an object in Python's notation.

    Raises:
        ValueError: the text is neither, or is nested more than 64 levels deep.
    """
    tokens = list(_tokens(text))
    if _depth(tokens) > _DEEPEST:
        raise ValueError("the value is nested too deeply")
    return parsed("".join(tokens))


def literal_text(quoted: str) -> str:
    """Return what a text between Python's quotes says."""
    return _ESCAPE.sub(_unescaped, quoted[1:-1])


def _tokens(text: str) -> Iterator[str]:
    """Yield the same value in JSON, token by token."""
    place = 0
    while place < len(text):
        token = _TOKEN.match(text, place)
        if token is None:
            raise ValueError("a text has no end")
        place = token.end()
        yield _as_json(token)


def _as_json(token: regex.Match[str]) -> str:
    match token.lastgroup:
        case "text":
            return written(literal_text(token[0]))
        case "name":
            return _NAMES[token[0]]
        case "comma":
            return ""
        case _:
            return token[0]


def _unescaped(escape: regex.Match[str]) -> str:
    letter = escape["letter"]
    if letter is None:
        return chr(int(escape[0][2:], base=16))
    return _LETTERS.get(letter, escape[0])


def _depth(tokens: Iterable[str]) -> int:
    """Return the largest bracket depth. Tokens that are strings begin with a quote."""
    depth = deepest = 0
    for token in tokens:
        depth += (token in ("[", "{")) - (token in ("]", "}"))
        deepest = max(deepest, depth)
    return deepest
