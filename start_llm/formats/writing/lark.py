"""Writes grammars in the language of llguidance, which is Lark's with JSON schemas in it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import regex

from start_llm.core.chat import Json

_SPACE = r"\n?[ \t]{0,32}"
"""Between the parts of a JSON text, at most: else a model can write blanks for ever."""
_OPTIONS = "x-guidance"
_ANY = "ANY"
_NO_FORCING = '%llguidance {"no_forcing": true}'
"""Where only one text can follow, the model still chooses how to cut it into tokens."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a schema of a grammar comes from: the field of the request, and what it is about."""

    field: str
    about: str


@dataclass(frozen=True, slots=True)
class Grammar:
    """A whole grammar.

    Attributes:
        schemas: those in it as JSON texts, each with its origin: to find the one that is at fault.
    """

    text: str
    schemas: Sequence[tuple[Origin, str]]


class Lark:
    """One grammar while it is written. Its methods return expressions, which stand for text.

    Args:
        control_tokens: texts that are one token each, and that nothing but this token says.
    """

    def __init__(self, control_tokens: Mapping[str, int]) -> None:
        self._control_tokens = control_tokens
        names = sorted(control_tokens, key=len, reverse=True)
        self._controls = regex.compile("|".join(map(regex.escape, names)) or r"(?!)")
        self._rules: list[str] = []
        self._schemas: list[tuple[Origin, str]] = []
        self._names = 0
        self.define(_ANY, "/(?s:.*)/")

    def literal(self, text: str) -> str:
        """Exactly this text."""
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
        """Text that a regular expression describes; it does not match nothing."""
        escaped = expression.replace("/", r"\/")
        return f"/{escaped}/"

    def until(self, end: str, *, unless: str | None = None) -> str:
        """Any text up to the first `end`, and that.

        Args:
            unless: what the text does not begin with.
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

    def schema(self, schema: Mapping[str, Json], origin: Origin, *, lenient: bool) -> str:
        """A JSON text that follows a schema.

        Args:
            lenient: words of the schema that cannot be enforced count for nothing; else they are an error.
        """
        options: Json = {"whitespace_pattern": _SPACE, "whitespace_flexible": False, "lenient": lenient}
        text = json.dumps({**schema, _OPTIONS: options})
        self._schemas.append((origin, text))
        return self.rule(f"%json {text}")

    def either(self, *expressions: str) -> str:
        return self.rule(" | ".join(expressions))

    def rule(self, body: str, *, is_lazy: bool = False) -> str:
        name = self.name()
        self.define(f"{name}[lazy]" if is_lazy else name, body)
        return name

    def name(self) -> str:
        """A new name for a rule, which `define` has to be told of."""
        self._names += 1
        return f"r{self._names}"

    def define(self, name: str, body: str) -> None:
        self._rules.append(f"{name}: {body}")

    def grammar(self, start: str) -> Grammar:
        return Grammar("\n".join([_NO_FORCING, f"start: {start}", *self._rules]), tuple(self._schemas))
