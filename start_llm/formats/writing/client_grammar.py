"""Fits a client's grammar for the text of a custom tool into the place where a call has that text.

llguidance reads the client's Lark. In a JSON string the text is escaped, so what the grammar says of the text
is translated to what JSON writes for it. Between tags the text must not contain the mark that ends it.

llguidance's lexer never takes back where a terminal ended, so in the middle of an escape or of a mark it is
too late to end one. Therefore all rules become terminals, which makes the whole grammar one. A grammar with
`%ignore`, or whose rules refer to themselves, keeps its rules; its patterns then match neither a character
that is escaped nor the first one of the mark.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

import regex

from start_llm.core.chat import TextGrammar
from start_llm.core.errors import InvalidRequest

_TOKEN = regex.compile(
    r"""(?P<comment>(?://|\#)[^\n]*)
    |(?P<import>%import[^\n]*)
    |(?P<ignore>%ignore\b)
    |(?P<forbidden>%\w*|@\w*|<[^<>\s]+>)
    |(?P<range>"(?:\\.|[^"\\\n])*"[ \t]*\.\.[ \t]*"(?:\\.|[^"\\\n])*")
    |(?P<text>"(?:\\.|[^"\\\n])*")(?P<text_flags>i?)
    |/(?P<pattern>(?:\\.|[^/\\])+)/(?P<pattern_flags>[imslux]*)
    |(?P<broken>["/])
    |(?P<negation>~(?=[ \t]*[^\s\d]))
    |(?P<alias>->[ \t]*\w+)
    |(?P<modifier>[?!](?=_?[a-z][\w-]*\s*:))
    |(?P<rule>(?<![\w-])_?[a-z][a-z0-9_-]*)(?P<defined>\s*:)?(?P<options>[\[.:](?=\S))?
    |(?P<terminal>[A-Z_][\w-]*)(?P<defined_terminal>\s*:)?
    |(?P<other>[\s|()]+|.)""",
    regex.VERBOSE | regex.DOTALL,
)
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
_UNESCAPED = r'[^\x00-\x1f"\\]'
_BOUNDARIES = frozenset("bBAzZ<>")
_ALL_PLAIN = "".join(map(chr, [*range(0x20, 0xD800), *range(0xE000, 0x10000), 0x1F41F])).translate(
    {ord('"'): None, ord("\\"): None}
)
_START = "start"


class _UnusableError(Exception):
    """The grammar has what cannot be used here; the text says what."""


def json_expression(grammar: TextGrammar) -> str:
    """Return an expression for what a JSON string has between its quotes.

    Raises:
        InvalidRequest: the grammar has parts that cannot be translated; names the tool.
    """

    def translated(source: str) -> str:
        whole = _as_one_terminal(source)
        return _nested(_JsonSource(whole or source, has_escapes=whole is not None).text)

    return _translated(grammar, translated)


def expression_until(grammar: TextGrammar, end: str) -> str:
    """Return an expression for the text up to and including the first `end`.

    Raises:
        InvalidRequest: see `json_expression`.
    """

    def translated(source: str) -> str:
        whole = _as_one_terminal(source)
        if whole is None:
            return f"{_nested(_WithoutEnd(source, end).text)} {json.dumps(end)}"
        with_end = f"/(?s:.*){_escaped(end)}(?s:.*)/"
        ended = f"ENDED: ({_terminal(_START)} & ~{with_end}) {json.dumps(end)}\nstart[lazy]: ENDED"
        return _nested(f"{_without_start(whole)}\n{ended}")

    return _translated(grammar, translated)


def plain_expression(grammar: TextGrammar) -> str:
    """Return an expression for the text, where it ends with what no text can be taken for."""
    return _translated(grammar, lambda source: _nested(_Rewriting(source).text))


def standalone(grammar: TextGrammar) -> str:
    """Return the grammar by itself, in llguidance's language.

    Raises:
        InvalidRequest: the grammar refers to what only a server's own grammar may.
    """
    return _translated(grammar, lambda source: _Rewriting(source).text)


def levels(grammar: TextGrammar) -> int:
    """Return how deeply the rules of a grammar refer to each other, at most."""
    return _in_order(_Terminals(_lark(grammar)).uses).levels


def refused(grammar: TextGrammar, reason: str) -> InvalidRequest:
    """Return the error for a grammar that cannot be used."""
    problem = f"'{grammar.field}': the grammar of the tool {grammar.tool!r} cannot be used: {reason}"
    return InvalidRequest(problem, param=grammar.field)


def _translated(grammar: TextGrammar, translate: Callable[[str], str]) -> str:
    try:
        return translate(_lark(grammar))
    except _UnusableError as problem:
        raise refused(grammar, f"{problem}.") from problem


def _nested(source: str) -> str:
    return f"%lark {{\n{source}\n}}"


def _lark(grammar: TextGrammar) -> str:
    """Return the definition in Lark. A regular expression matches the whole text, with or without anchors."""
    if grammar.syntax == "lark":
        return grammar.definition
    pattern = grammar.definition.removeprefix("^")
    if pattern.endswith("$") and not regex.search(r"(?<!\\)(?:\\\\)*\\\$\Z", pattern):
        pattern = pattern[:-1]
    # A slash ends an expression of Lark, and so does a line.
    slashed = regex.sub(r"(\\.)|/", lambda match: match[1] or r"\/", pattern, flags=regex.DOTALL)
    slashed = slashed.replace("\n", r"\n")
    return f"{_START}: /(?:{slashed})/" if slashed else f'{_START}: ""'


def _escaped(text: str) -> str:
    """Return an expression of Lark's for exactly this text."""
    lines = (regex.escape(line, literal_spaces=True).replace("/", r"\/") for line in text.split("\n"))
    return r"\n".join(lines)


# ----------------------------------------------------------------------------------------- a grammar's source


class _Rewriting:
    """The source of a grammar, some of its tokens rewritten."""

    def __init__(self, source: str) -> None:
        self._source = source

    @property
    def text(self) -> str:
        return "".join(map(self._token, _TOKEN.finditer(self._source)))

    def _token(self, match: regex.Match[str]) -> str:
        if match["forbidden"]:
            raise _UnusableError(f"{match['forbidden']} is not supported")
        if match["broken"]:
            raise _UnusableError("a text or a pattern has no end")
        if match["comment"]:
            return ""
        if match["pattern"] is not None:
            return self._pattern(match["pattern"], match["pattern_flags"])
        return self._other(match)

    def _pattern(self, pattern: str, flags: str) -> str:
        return f"/{pattern}/{flags}"

    def _other(self, match: regex.Match[str]) -> str:
        return match[0]


class _Terminals(_Rewriting):
    """The same grammar with terminals in place of rules.

    Attributes:
        rules: its source.
        is_possible: terminals can say all that the rules say.
        uses: the names that each rule and each terminal refers to.
    """

    def __init__(self, source: str) -> None:
        super().__init__(source)
        self.is_possible = True
        self.uses: dict[str, list[str]] = {}
        self._defined = ""
        self.rules = self.text

    def _other(self, match: regex.Match[str]) -> str:
        if match["ignore"] or match["options"]:
            self.is_possible = False
        if match["alias"] or match["modifier"]:
            return ""
        name = match["rule"] or match["terminal"]
        if name is None:
            return match[0]
        if match["defined"] or match["defined_terminal"]:
            self._defined = name
            self.uses[name] = []
        else:
            self.uses.setdefault(self._defined, []).append(name)
        return _terminal(name) + match[0].removeprefix(name) if match["rule"] else match[0]


def _terminal(rule: str) -> str:
    return f"RULE_{rule.upper()}"


@lru_cache(16)
def _as_one_terminal(source: str) -> str | None:
    """Return the grammar with terminals in place of rules; None if terminals cannot say the same."""
    terminals = _Terminals(source)
    if not terminals.is_possible or _in_order(terminals.uses).has_cycle:
        return None
    return f"{terminals.rules}\n{_START}: {_terminal(_START)}"


def _without_start(whole: str) -> str:
    return whole.rpartition("\n")[0]


class _Order(NamedTuple):
    """How the names of a grammar refer to each other.

    Attributes:
        levels: the most names of which each refers to the next. Of names in a cycle, or above one, nothing is
            known but their number, so all of them count.
        has_cycle: a name refers to itself, through others or directly.
    """

    levels: int
    has_cycle: bool


def _in_order(uses: Mapping[str, Sequence[str]]) -> _Order:
    sorter = TopologicalSorter({name: set(used) & uses.keys() for name, used in uses.items()})
    with suppress(CycleError):  # it goes on as far as it can
        sorter.prepare()
    levels = ordered = 0
    while names := sorter.get_ready():
        sorter.done(*names)
        levels, ordered = levels + 1, ordered + len(names)
    in_cycles = len(uses) - ordered
    return _Order(levels + in_cycles, has_cycle=in_cycles > 0)


class _WithoutEnd(_Rewriting):
    """No pattern of it matches the first character of the end, unless it matches nothing else."""

    def __init__(self, source: str, end: str) -> None:
        super().__init__(source)
        self._first = end[0]

    def _pattern(self, pattern: str, flags: str) -> str:
        def narrowed(text: str) -> str:
            others = f"[{text}&&[^{_escaped(self._first)}]]"
            return others if _matches_any_but(text, self._first) else text

        return f"/{_CharacterPattern(pattern, flags, narrowed).text}/{flags}"


# ----------------------------------------------------------------------------------------------- JSON strings


class _JsonSource(_Rewriting):
    """The same texts, as a JSON string has them.

    Args:
        has_escapes: patterns match escaped characters too.
    """

    def __init__(self, source: str, *, has_escapes: bool) -> None:
        super().__init__(source)
        self._has_escapes = has_escapes

    def _pattern(self, pattern: str, flags: str) -> str:
        of_class = partial(_json_class, has_escapes=self._has_escapes)
        return f"/{_CharacterPattern(pattern, flags, of_class, _json_character).text}/{flags}"

    def _other(self, match: regex.Match[str]) -> str:
        if match["text"] is not None:
            return self._text(match["text"], match["text_flags"])
        if match["range"]:
            return self._range(match["range"])
        if match["negation"]:
            raise _UnusableError("'~' in front of a terminal is not supported with this model")
        return self._import(match["import"]) if match["import"] else match[0]

    def _text(self, text: str, flags: str) -> str:
        decoded = _decoded(text)
        if flags:
            return self._pattern(_escaped(decoded), flags)
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
            raise _UnusableError(f"{between} is no range of characters")
        return self._pattern(f"[\\x{{{ord(low):x}}}-\\x{{{ord(high):x}}}]", "")


def _decoded(text: str) -> str:
    """Return the text that a string of Lark stands for."""
    try:
        return json.loads(regex.sub(r"(\\\\)|\\x", lambda match: match[1] or r"\u00", text))
    except ValueError as error:
        raise _UnusableError(f"the string {text} is malformed") from error


class _CharacterPattern:
    """Rewrites a regular expression where it matches single characters of a class.

    Groups, alternatives and repetitions stay.

    Args:
        of_class: returns the expression in place of a class of characters.
        of_character: the same for one character, which may be written in any way.
    """

    def __init__(
        self,
        pattern: str,
        flags: str,
        of_class: Callable[[str], str],
        of_character: Callable[[str], str] = str,
    ) -> None:
        if "x" in flags:
            raise _UnusableError("the flag x is not supported")
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
            raise _UnusableError("the flag x is not supported")
        is_all = ("s" in on or self._dot_is_all[-1]) and "s" not in off
        if match["scope"] == ")":
            self._dot_is_all[-1] = is_all
        else:
            self._dot_is_all.append(is_all)


def _json_character(text: str) -> str:
    """Return an expression for one character, which may be written in any way."""
    special = _special_characters(text)
    return _escapes(special) if special else text


@lru_cache(256)
def _json_class(text: str, has_escapes: bool) -> str:
    """Return an expression for a class of characters: those that JSON has as they are, and escapes."""
    ways = [f"[{text}&&{_UNESCAPED}]"] if _compiled(text).search(_ALL_PLAIN) else []
    special = _special_characters(text)
    if special and (has_escapes or not ways):
        ways.append(_escapes(special))
    return f"(?:{'|'.join(ways)})"


def _escapes(characters: Sequence[str]) -> str:
    """Return an expression for JSON's escapes of these characters, the usual one of each."""
    escapes = [json.dumps(character)[2:-1] for character in characters]
    return rf"(?-i:\\(?:{'|'.join(map(regex.escape, escapes))}))"


def _special_characters(text: str) -> list[str]:
    return [special for special in _SPECIAL if _compiled(text).fullmatch(special)]


@lru_cache(256)
def _matches_any_but(text: str, excluded: str) -> bool:
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
        raise _UnusableError(f"{text} is no expression for characters") from error
