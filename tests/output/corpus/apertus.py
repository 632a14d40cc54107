"""Apertus: a JSON list of objects with a tool's name each."""

from tests.output.corpus.case import Call
from tests.output.corpus.lists import A, ListForm, list_cases

_FORM = ListForm(
    writer="apertus",
    opening="<|tools_prefix|>[",
    closing="]<|tools_suffix|>",
    good='{"read": {"path": "a"}}',
    bad='{"remove": {}}',
    bad_call=Call("remove"),
    malformed='{"read": {"path": }}',
)
_GOOD = _FORM.good

CASES = (
    *list_cases(_FORM),
    _FORM.case("white space everywhere",
               '<|tools_prefix|> [ { "read" : {"path": "a"} } ,\n{"list":{}} ] <|tools_suffix|>',
               A, Call("list")),
    _FORM.case("no brackets", f"<|tools_prefix|>{_GOOD}<|tools_suffix|>", A),
    _FORM.case("no last brace", _FORM.of(_GOOD[:-1]), A),
    _FORM.case("two blocks", _FORM.of(_GOOD) * 2, A, A),
    _FORM.plain("a name and arguments", _FORM.of('{"name": "read", "arguments": {"path": "a"}}')),
    _FORM.plain("a list of arguments", _FORM.of('{"read": ["a"]}')),
    _FORM.plain("no value", _FORM.of('{"read": null}')),
)  # fmt: skip
