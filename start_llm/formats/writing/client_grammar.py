"""Fits a client's grammar for the text of a custom tool into the place where a call has that text.

llguidance reads the client's Lark. In a JSON string the text is escaped, so what the grammar says of the text
is translated to what JSON writes for it (`formats.writing.json_string_source`). Between tags the text must
not contain the mark that ends it.

llguidance's lexer never takes back where a terminal ended, so in the middle of an escape or of a mark it is
too late to end one. Therefore all rules become terminals, which makes the whole grammar one. A grammar with
`%ignore`, or whose rules refer to themselves, keeps its rules; its patterns then match neither a character
that is escaped nor the first one of the mark.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

import regex

from start_llm.core.chat import TextGrammar
from start_llm.core.errors import InvalidRequest
from start_llm.formats.writing.character_classes import RewrittenPattern, matches_any_but
from start_llm.formats.writing.json_string_source import JsonStringSource
from start_llm.formats.writing.lark_source import RewrittenSource, UnusableGrammar, pattern_for

_START = "start"


def json_expression(grammar: TextGrammar) -> str:
    """Return an expression for what a JSON string has between its quotes.

    Raises:
        InvalidRequest: the grammar has parts that cannot be translated; names the tool.
    """

    def translated(source: str) -> str:
        whole = _as_one_terminal(source)
        return _nested(JsonStringSource(whole or source, has_escapes=whole is not None).text)

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
        with_end = f"/(?s:.*){pattern_for(end)}(?s:.*)/"
        ended = f"ENDED: ({_terminal(_START)} & ~{with_end}) {json.dumps(end)}\nstart[lazy]: ENDED"
        return _nested(f"{_without_start(whole)}\n{ended}")

    return _translated(grammar, translated)


def plain_expression(grammar: TextGrammar) -> str:
    """Return an expression for the text, where it ends with what no text can be taken for."""
    return _translated(grammar, lambda source: _nested(RewrittenSource(source).text))


def standalone(grammar: TextGrammar) -> str:
    """Return the grammar by itself, in llguidance's language.

    Raises:
        InvalidRequest: the grammar refers to what only a server's own grammar may.
    """
    return _translated(grammar, lambda source: RewrittenSource(source).text)


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
    except UnusableGrammar as problem:
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


# ----------------------------------------------------------------------------------------- a grammar's source


class _Terminals(RewrittenSource):
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


class _WithoutEnd(RewrittenSource):
    """No pattern of it matches the first character of the end, unless it matches nothing else."""

    def __init__(self, source: str, end: str) -> None:
        super().__init__(source)
        self._first = end[0]

    def _pattern(self, pattern: str, flags: str) -> str:
        def narrowed(text: str) -> str:
            others = f"[{text}&&[^{pattern_for(self._first)}]]"
            return others if matches_any_but(text, self._first) else text

        return f"/{RewrittenPattern(pattern, flags, narrowed).text}/{flags}"
