"""Checks that a JSON schema is valid."""

from jsonschema import Draft4Validator, Draft7Validator, Draft202012Validator
from jsonschema.exceptions import best_match

from start_llm.core.chat import Json

_DIALECTS = (Draft7Validator, Draft202012Validator, Draft4Validator)
_LONGEST_REASON = 200


def schema_error(schema: Json) -> str | None:
    """Return the error of a schema that is invalid in every dialect that clients use, or None.

    llguidance panics on some invalid schemas and puts a stack trace into its error. For that it reads the
    debug symbols of the whole process and keeps 50 MB of memory (lesson 47).
    None also means that the text of the schema is nested too deeply for this check.
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
