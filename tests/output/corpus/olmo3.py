"""Olmo 3: Python's calls line by line between tags."""

from tests.output.corpus.case import Call
from tests.output.corpus.lists import A, ListForm, list_cases
from tests.output.corpus.python_calls import BAD, GOOD, python_cases

_FORM = ListForm(
    writer="olmo3",
    opening="<function_calls>",
    closing="</function_calls>",
    between="\n",
    good=GOOD,
    bad=BAD,
    bad_call=Call("remove", {"path": "/"}),
    malformed="read(path=)",
)

CASES = (
    *list_cases(_FORM),
    *python_cases(_FORM),
    _FORM.case("line breaks around the calls", f"<function_calls>\n{GOOD}\n{GOOD}\n</function_calls>", A, A),
    _FORM.case("two blocks", f"{_FORM.of(GOOD)}\n{_FORM.of(GOOD)}", A, A),
    _FORM.case("text around the calls", f"I look.\n{_FORM.of(GOOD)}Done.", A, content="I look.Done."),
    _FORM.case("an object for a call", _FORM.of('{"name": "read", "arguments": {}}'), Call("read", {})),
    _FORM.plain("markup in prose", "Put calls between <function_calls> and </function_calls>."),
)
