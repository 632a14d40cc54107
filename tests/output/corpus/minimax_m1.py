"""MiniMax-M1: JSON objects line by line between tags."""

from tests.output.corpus.lists import A, ListForm, list_cases

_FORM = ListForm(writer="minimax_m1", opening="<tool_calls>\n", closing="\n</tool_calls>", between="\n")
_GOOD = _FORM.good

CASES = (
    *list_cases(_FORM),
    _FORM.case("no line breaks", f"<tool_calls>{_GOOD}{_GOOD}</tool_calls>", A, A),
    _FORM.case("a list", f"<tool_calls>\n[{_GOOD}, {_GOOD}]\n</tool_calls>", A, A),
    _FORM.case("two blocks", f"{_FORM.of(_GOOD)}\n\n{_FORM.of(_GOOD)}", A, A),
    _FORM.plain("prose about the tags", "Put it between <tool_calls> and </tool_calls>."),
)
