"""Whether a JSON schema is one.

llguidance panics over some that are not, with a stack trace as its reason, for which it reads the debugging
symbols of the whole process: 50 MB that it keeps (lesson 47).
"""

from __future__ import annotations

from jsonschema import Draft4Validator, Draft7Validator, Draft202012Validator
from jsonschema.exceptions import best_match

from start_llm.core.chat import Json

_DIALECTS = (Draft7Validator, Draft202012Validator, Draft4Validator)
_LONGEST_REASON = 200


def fault(schema: Json) -> str | None:
    """What is wrong with a schema that is none in any dialect that clients write; None: nothing is known."""
    judges = [dialect(dialect.META_SCHEMA) for dialect in _DIALECTS]
    try:
        if any(judge.is_valid(schema) for judge in judges):
            return None
        error = best_match(judges[0].iter_errors(schema))
    except RecursionError:
        # Nested in itself a hundred times: llguidance says how deep it goes.
        return None
    if error is None:
        return None
    reason = error.message
    shown = reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]} ..."
    return f"{error.json_path}: {shown}"
