"""Nemotron Nano 2: a JSON list between tags."""

from tests.output.corpus.lists import A, ListForm, list_cases

_FORM = ListForm(writer="toolcall", opening="<TOOLCALL>[", closing="]</TOOLCALL>")
_GOOD = _FORM.good

CASES = (
    *list_cases(_FORM),
    _FORM.case("no brackets", f"<TOOLCALL>{_GOOD}</TOOLCALL>", A),
    _FORM.case("white space everywhere", f"<TOOLCALL> [ {_GOOD} ,\n {_GOOD} ] \n</TOOLCALL>", A, A),
    _FORM.case("two blocks", f"{_FORM.of(_GOOD)}\n{_FORM.of(_GOOD)}", A, A),
    _FORM.case("no last tag before prose", f"<TOOLCALL>[{_GOOD}] <b>", A, content=" <b>"),
    _FORM.case("no last tag before its like", f"<TOOLCALL>[{_GOOD}]</TOOL>", A, content="</TOOL>"),
    _FORM.case("no call after the comma", f"<TOOLCALL>[{_GOOD}, 5]</TOOLCALL>", A),
    _FORM.case("the tag's end in a value", _FORM.of(_GOOD.replace('"a"', '"]</TOOLCALL>"')),
               type(A)("read", {"path": "]</TOOLCALL>"})),
    _FORM.case("arguments in a text", _FORM.of('{"name": "read", "arguments": "{\\"path\\": \\"a\\"}"}'), A),
    _FORM.plain("a list of arguments", _FORM.of('{"name": "read", "arguments": [1]}')),
    _FORM.plain("a name that is no text", _FORM.of('{"name": 5, "arguments": {}}')),
)  # fmt: skip
