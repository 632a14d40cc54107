"""Builds grammars in llguidance's language: Lark's with embedded JSON schemas."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import regex

from start_llm.core.chat import Json, TextGrammar
from start_llm.core.errors import InvalidRequest
from start_llm.formats.writing.client_grammar import expression_until, json_expression, plain_expression

_MAX_CHARACTERS = 2**20
_SPACE = r"\n?[ \t]{0,32}"
"""Maximum white space between JSON tokens. Without a limit a model can write blanks forever."""
_OPTIONS = "x-guidance"
_ANY = "ANY"
_NO_FORCING = '%llguidance {"no_forcing": true}'
"""The model chooses the tokens even where only one text can follow."""


@dataclass(frozen=True, slots=True)
class SchemaOrigin:
    """The source of a schema in a grammar: the request's field, and a description for errors."""

    field: str
    about: str


@dataclass(frozen=True, slots=True)
class Grammar:
    """A complete grammar.

    Attributes:
        schemas: the grammar's schemas as JSON texts with their origins, used to find a schema at fault.
        texts: the clients' grammars that it contains.
    """

    text: str
    schemas: Sequence[tuple[SchemaOrigin, str]]
    texts: Sequence[TextGrammar] = ()


class Lark:
    """Builds one grammar. The methods return expressions.

    Args:
        control_tokens: texts that are single tokens and that no other token sequence produces.
    """

    def __init__(self, control_tokens: Mapping[str, int]) -> None:
        self._control_tokens = control_tokens
        names = sorted(control_tokens, key=len, reverse=True)
        self._controls = regex.compile("|".join(map(regex.escape, names)) or r"(?!)")
        self._rules: list[str] = []
        self._schemas: list[tuple[SchemaOrigin, str]] = []
        self._schema_rules: dict[str, str] = {}
        self._texts: list[TextGrammar] = []
        self._names = 0
        self._characters = 0
        self.define(_ANY, "/(?s:.*)/")

    def literal(self, text: str) -> str:
        """Match exactly this text."""
        parts: list[str] = []
        place = 0
        for match in self._controls.finditer(text):
            parts += self._quoted(text[place : match.start()])
            parts.append(f"<[{self._control_tokens[match[0]]}]>")
            place = match.end()
        return " ".join([*parts, *self._quoted(text[place:])])

    def _quoted(self, text: str) -> list[str]:
        return [json.dumps(text)] if text else []

    def pattern(self, expression: str) -> str:
        """Match a regular expression, which must not match the empty text."""
        escaped = expression.replace("/", r"\/")
        return f"/{escaped}/"

    def until(self, end: str, *, unless: str | None = None) -> str:
        """Match any text up to and including the first `end`.

        Args:
            unless: the text must not begin with this.
        """
        text = _ANY if unless is None else self._other_than(unless)
        control = self._controls.search(end)
        if control is None:
            return self.rule(f"{text} {json.dumps(end)}", is_lazy=True)
        before = end[: control.start()]
        if before:
            text = self._terminal(f"{text} {json.dumps(before)}")
        return f"{text} {self.literal(end[control.start() :])}"

    def _other_than(self, beginning: str) -> str:
        return self._terminal(f"{_ANY} & ~{self.pattern(regex.escape(beginning) + '(?s:.*)')}")

    def _terminal(self, body: str) -> str:
        name = self.name().upper()
        self.define(name, body)
        return name

    def is_control(self, text: str) -> bool:
        return text in self._control_tokens

    def schema(self, schema: Mapping[str, Json], origin: SchemaOrigin, *, lenient: bool) -> str:
        """Match JSON that follows a schema.

        Texts may have `\\uXXXX` escapes, halves of surrogate pairs as pairs only. Texts that the schema gives
        (`enum`, `const`, `pattern`, listed names) have none but those that JSON demands.

        Args:
            lenient: ignore keywords that cannot be enforced; otherwise they are an error.
        """
        options: Json = {
            "whitespace_pattern": _SPACE,
            "whitespace_flexible": False,
            "json_allow_general_unicode_escapes": True,
            "lenient": lenient,
        }
        text = json.dumps({**schema, _OPTIONS: options})
        self._schemas.append((origin, text))
        if text not in self._schema_rules:
            self._schema_rules[text] = self.rule(f"%json {text}")
        return self._schema_rules[text]

    def json_text(self, grammar: TextGrammar) -> str:
        """Match a JSON string whose text follows a client's grammar."""
        self._texts.append(grammar)
        return self.rule(f'"\\"" {json_expression(grammar)} "\\""')

    def text_until(self, grammar: TextGrammar, end: str) -> str:
        """Match a text that follows a client's grammar, up to and including the first `end`."""
        self._texts.append(grammar)
        control = self._controls.search(end)
        before = end[: control.start()] if control else end
        text = expression_until(grammar, before) if before else plain_expression(grammar)
        return self.rule(f"{text} {self.literal(end[len(before) :])}")

    def either(self, *expressions: str) -> str:
        return self.rule(" | ".join(expressions))

    def rule(self, body: str, *, is_lazy: bool = False) -> str:
        name = self.name()
        self.define(f"{name}[lazy]" if is_lazy else name, body)
        return name

    def name(self) -> str:
        """Return a new rule name. The caller must `define` it."""
        self._names += 1
        return f"r{self._names}"

    def define(self, name: str, body: str) -> None:
        """Add a rule.

        Raises:
            InvalidRequest: the grammar is too large. The rest of it may be much larger.
        """
        rule = f"{name}: {body}"
        self._rules.append(rule)
        self._characters += len(rule)
        if self._characters > _MAX_CHARACTERS:
            field = self._schemas[-1][0].field if self._schemas else "tools"
            problem = f"The schemas make a grammar of more than {_MAX_CHARACTERS} characters."
            raise InvalidRequest(problem, param=field)

    def grammar(self, start: str) -> Grammar:
        text = "\n".join([_NO_FORCING, f"start: {start}", *self._rules])
        return Grammar(text, tuple(self._schemas), tuple(self._texts))


def separated(lark: Lark, members: Mapping[str, str], required: Collection[Json], comma: str) -> str:
    """Return a grammar for comma-separated members. Each possible first member is one alternative.

    Args:
        members: the expression of each member, by name.
        comma: an expression.
    """
    ways: list[str] = []
    after, is_open = "", True
    for name, member in reversed(list(members.items())):
        if name in required:
            ways, is_open = [], False
        ways.append(f"{member} {after}".strip())
        next_one = f"({comma} {member}){'' if name in required else '?'}"
        after = lark.rule(f"{next_one} {after}".strip())
    first = lark.either(*reversed(ways))
    return f"({first})?" if is_open else first
