"""Rewrites regular expressions where they match single characters, and tells which characters those are.

A character may be an escape in a JSON string, or begin the mark that ends a text. So a class of characters is
where the pattern of a client has to change.
"""

from collections.abc import Callable
from functools import lru_cache

import regex

from start_llm.formats.writing.lark_source import UnusableGrammar

_ATOM = regex.compile(
    r"""(?P<group>\((?:\?P?<\w+>|\?(?P<on>[a-zA-Z]*)(?:-(?P<off>[a-zA-Z]+))?(?P<scope>[:)]))?)
    |(?P<close>\))
    |(?P<set>\[\^?\]?(?P<members>(?:\\.|\[(?&members)\]|[^\[\]\\])*)\])
    |(?P<family>\\(?:[dDwWsS]|[pP](?:\{[^{}]*\}|\w)))
    |(?P<escape>\\(?:[xu]\{[0-9A-Fa-f]{1,6}\}|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|.))
    |(?P<any>\.)
    |(?P<plain>.)""",
    regex.VERBOSE | regex.DOTALL,
)
_SPECIAL = (*map(chr, range(32)), '"', "\\")
"""The characters that a JSON string has as escapes."""
_BOUNDARIES = frozenset("bBAzZ<>")
_ALL_PLAIN = "".join(map(chr, [*range(0x20, 0xD800), *range(0xE000, 0x10000), 0x1F41F])).translate(
    {ord('"'): None, ord("\\"): None}
)


class RewrittenPattern:
    """A regular expression, rewritten where it matches single characters.

    Groups, alternatives and repetitions stay.

    Args:
        of_class: returns the expression in place of a class of characters.
        of_character: the same for one character, which may be written in any way.

    Raises:
        UnusableGrammar: the expression has the flag x, which changes what its characters mean.
    """

    def __init__(
        self,
        pattern: str,
        flags: str,
        of_class: Callable[[str], str],
        of_character: Callable[[str], str] = str,
    ) -> None:
        if "x" in flags:
            raise UnusableGrammar("the flag x is not supported")
        self._pattern = pattern
        self._of_class = of_class
        self._of_character = of_character
        self._dot_is_all = ["s" in flags]

    @property
    def text(self) -> str:
        return "".join(map(self._atom, _ATOM.finditer(self._pattern)))

    def _atom(self, match: regex.Match[str]) -> str:
        text = match[0]
        if match["group"]:
            self._open(match)
        elif match["close"]:
            if len(self._dot_is_all) > 1:
                self._dot_is_all.pop()
        elif match["any"]:
            return self._of_class(r"[\s\S]" if self._dot_is_all[-1] else r"[^\n]")
        elif match["set"] or match["family"]:
            return self._of_class(text)
        elif text in _SPECIAL or (match["escape"] and text[1] not in _BOUNDARIES):
            return self._of_character(text)
        return text

    def _open(self, match: regex.Match[str]) -> None:
        """Follow the flag by which a dot matches line breaks, through the groups."""
        on, off = match["on"] or "", match["off"] or ""
        if "x" in on:
            raise UnusableGrammar("the flag x is not supported")
        is_all = ("s" in on or self._dot_is_all[-1]) and "s" not in off
        if match["scope"] == ")":
            self._dot_is_all[-1] = is_all
        else:
            self._dot_is_all.append(is_all)


def special_characters(text: str) -> list[str]:
    """Return the characters that an expression matches and that a JSON string has as escapes.

    Raises:
        UnusableGrammar: it is no expression for single characters.
    """
    return [special for special in _SPECIAL if _compiled(text).fullmatch(special)]


def matches_unescaped(text: str) -> bool:
    """Return whether an expression matches a character that a JSON string has as it is.

    Raises:
        UnusableGrammar: see `special_characters`.
    """
    return _compiled(text).search(_ALL_PLAIN) is not None


@lru_cache(256)
def matches_any_but(text: str, excluded: str) -> bool:
    """Return whether an expression matches a character other than the excluded one.

    Raises:
        UnusableGrammar: see `special_characters`.
    """
    others = "".join(_SPECIAL) + _ALL_PLAIN
    return _compiled(text).search(others.replace(excluded, "")) is not None


@lru_cache(256)
def _compiled(text: str) -> regex.Pattern[str]:
    """Return the expression for single characters, as Python writes it."""
    try:
        python = regex.sub(
            r"\\[xu]\{([0-9a-fA-F]{1,6})\}", lambda digits: rf"\U{int(digits[1], 16):08x}", text
        )
        return regex.compile(python, regex.VERSION1)
    except regex.error as error:
        raise UnusableGrammar(f"{text} is no expression for characters") from error
