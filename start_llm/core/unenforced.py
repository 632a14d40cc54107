"""Names the keywords of a JSON Schema that no grammar enforces."""

from collections.abc import Iterator, Mapping

from start_llm.core.chat import Json

UNENFORCED = "x-start-llm-unenforced"
"""The header that names the keywords of a request's schema which its reply may break."""

KEYWORDS = frozenset(
    """
    uniqueItems contains minContains maxContains unevaluatedItems propertyNames dependentRequired
    dependentSchemas dependencies unevaluatedProperties not if then else $dynamicRef
    """.split()
)
"""Those that llguidance does not know."""
_FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uri uuid unknown".split())
_ONE_OF = "oneOf"
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose members are names with a schema each."""
_LITERAL = frozenset({"enum", "const", "default", "examples"})


def unenforced_keywords(schema: Mapping[str, Json]) -> tuple[str, ...]:
    """Return the keywords in a schema that a reply may break, in the order of the alphabet.

    `oneOf` is among them because it is enforced as `anyOf` where more than one of its schemas may fit.
    """
    return tuple(sorted({word for part in _schemas(dict(schema)) for word in _unenforced(part)}))


def _unenforced(schema: Mapping[str, Json]) -> Iterator[str]:
    yield from KEYWORDS.intersection(schema)
    if _ONE_OF in schema:
        yield _ONE_OF
    form = schema.get("format")
    if isinstance(form, str) and form not in _FORMATS and schema.get("type") not in ("integer", "number"):
        yield "format"


def _schemas(schema: Json) -> Iterator[Mapping[str, Json]]:
    """Yield every object that may be a schema, however deep it is."""
    left: list[Json] = [schema]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            yield value
            left += (part for word, inner in value.items() for part in _parts(word, inner))


def _parts(word: str, value: Json) -> list[Json]:
    if word in _LITERAL:
        return []
    return list(value.values()) if word in _NAMED and isinstance(value, dict) else [value]
