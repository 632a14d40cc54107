"""How deep a JSON schema goes, its references followed.

llguidance follows them by recursion on the thread's own stack. A chain of two thousand, each through an
array, is 120 KB of JSON and ends the process (lesson 43).
"""

from __future__ import annotations

from collections.abc import Iterator

from start_llm.core.chat import Json
from start_llm.formats.reading.schema import resolve

MOST_LEVELS = 250
"""With a stack of 2 MiB 300 passed and 600 did not; threads have 8 MiB as a rule."""


def is_too_deep(schema: Json) -> bool:
    """Whether some way through the schema has more than `MOST_LEVELS` objects. A circle counts once."""
    try:
        _Walk(schema).levels(schema, 0)
    except _TooDeepError:
        return True
    return False


class _TooDeepError(Exception):
    pass


class _Walk:
    """The longest way below each definition, each looked at once."""

    def __init__(self, root: Json) -> None:
        self._root = root
        self._below: dict[str, int] = {}

    def levels(self, schema: Json, above: int) -> int:
        """Levels of a schema that has `above` levels above it."""
        if above > MOST_LEVELS:
            raise _TooDeepError
        below = [self.levels(part, above + 1) for part in _parts(schema)]
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if isinstance(reference, str):
            below.append(self._behind(reference, above + 1))
        levels = 1 + max(below, default=0)
        if above + levels > MOST_LEVELS:
            raise _TooDeepError
        return levels

    def _behind(self, reference: str, above: int) -> int:
        if reference not in self._below:
            self._below[reference] = 0
            self._below[reference] = self.levels(self._named(reference), above)
        return self._below[reference]

    def _named(self, reference: str) -> Json:
        return resolve(reference, self._root) if isinstance(self._root, dict) else None


def _parts(schema: Json) -> Iterator[Json]:
    """Objects in an object, through lists; lists of lists are no schemas."""
    values = list(schema.values()) if isinstance(schema, dict) else []
    for value in values:
        if isinstance(value, dict):
            yield value
        elif isinstance(value, list):
            yield from (item for item in value if isinstance(item, dict))
