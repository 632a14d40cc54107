"""Checks that a JSON schema is valid, and measures how deeply it nests, following its references.

llguidance follows references by recursion on the thread's stack. A chain of two thousand references, each
through an array, is 120 KB of JSON and crashes the process (lesson 43).
"""

from collections.abc import Iterator

from jsonschema import Draft4Validator, Draft7Validator, Draft202012Validator
from jsonschema.exceptions import best_match

from start_llm.core.chat import Json
from start_llm.formats.reading.schema import resolve

MAX_LEVELS = 250
"""With a 2 MiB stack 300 levels passed and 600 did not. Threads usually have 8 MiB."""


def is_too_deep(schema: Json) -> bool:
    """Return True if a path through the schema has more than `MAX_LEVELS` objects. A cycle counts once."""
    try:
        _Walk(schema).levels(schema, 0)
    except _TooDeepError:
        return True
    return False


class _TooDeepError(Exception):
    pass


class _Walk:
    """Measures the longest path below each definition. Visits each definition once."""

    def __init__(self, root: Json) -> None:
        self._root = root
        self._below: dict[str, int] = {}

    def levels(self, schema: Json, above: int) -> int:
        """Return the number of levels of a schema that has `above` levels above it."""
        if above > MAX_LEVELS:
            raise _TooDeepError
        below = [self.levels(part, above + 1) for part in _parts(schema)]
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if isinstance(reference, str):
            below.append(self._after(reference, above + 1))
        levels = 1 + max(below, default=0)
        if above + levels > MAX_LEVELS:
            raise _TooDeepError
        return levels

    def _after(self, reference: str, above: int) -> int:
        if reference not in self._below:
            self._below[reference] = 0
            named = resolve(reference, self._root) if isinstance(self._root, dict) else None
            self._below[reference] = self.levels(named, above)
        return self._below[reference]


def _parts(schema: Json) -> Iterator[Json]:
    """Yield the objects directly inside an object or in its lists. Nested lists contain no schemas."""
    values = list(schema.values()) if isinstance(schema, dict) else []
    for value in values:
        if isinstance(value, dict):
            yield value
        elif isinstance(value, list):
            yield from (item for item in value if isinstance(item, dict))


_DIALECTS = (Draft7Validator, Draft202012Validator, Draft4Validator)
_LONGEST_REASON = 200


def schema_error(schema: Json) -> str | None:
    """Return the error of a schema that is invalid in every dialect that clients use, or None.

    llguidance panics on some invalid schemas and puts a stack trace into its error. For that it reads the
    debug symbols of the whole process and keeps 50 MB of memory (lesson 47).
    None also means that the schema is nested too deeply for this check.
    """
    judges = [dialect(dialect.META_SCHEMA) for dialect in _DIALECTS]
    try:
        if any(judge.is_valid(schema) for judge in judges):
            return None
        error = best_match(judges[0].iter_errors(schema))
    except RecursionError:
        # A hundred nested schemas exceed this validator's recursion. llguidance reports its own limit.
        return None
    if error is None:
        return None
    reason = error.message
    shown = reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]} ..."
    return f"{error.json_path}: {shown}"
