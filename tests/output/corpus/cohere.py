"""Cohere: a JSON list of numbered actions."""

from tests.output.corpus.case import Call
from tests.output.corpus.lists import A, ListForm, list_cases

_FORM = ListForm(
    writer="cohere",
    opening="<|START_ACTION|>[\n    ",
    closing="\n]<|END_ACTION|>",
    between=",\n    ",
    good='{"tool_call_id": "0", "tool_name": "read", "parameters": {"path": "a"}}',
    bad='{"tool_call_id": "0", "tool_name": "remove!", "parameters": {}}',
    malformed='{"tool_call_id": "0", "tool_name": "read", "parameters": {"path": }}',
)
_GOOD = _FORM.good

CASES = (
    *list_cases(_FORM),
    _FORM.case("no parameters", _FORM.of('{"tool_call_id": "0", "tool_name": "list"}'), Call("list")),
    _FORM.case("a number that is none", _FORM.of(_GOOD.replace('"0"', "7")), A),
    _FORM.case("no number", _FORM.of(_GOOD.replace('"tool_call_id": "0", ', "")), A),
    _FORM.case("two blocks", _FORM.of(_GOOD) * 2, A, A),
    _FORM.plain("parameters beside the name", _FORM.of('{"tool_name": "read", "path": "a"}')),
    _FORM.plain("no name", _FORM.of('{"tool_call_id": "0", "parameters": {"path": "a"}}')),
)
