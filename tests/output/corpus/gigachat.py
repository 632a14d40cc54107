"""GigaChat 3: an object after a role of its own, or after a mark."""

from tests.output.corpus.lists import A, ListForm, list_cases

_ROLE = ListForm(writer="gigachat_role", opening="function call<|role_sep|>\n", closing="", between="\n")
_MARK = ListForm(writer="gigachat", opening="<|function_call|>", closing="", between="<|function_call|>")
_GOOD = _ROLE.good

CASES = (
    *(case for case in list_cases(_ROLE) if case.name != "an empty list"),
    _ROLE.case("no line break", f"function call<|role_sep|>{_GOOD}", A),
    _ROLE.case("text and a message after it", f"I look.<|message_sep|>\n\n{_ROLE.of(_GOOD)}", A,
               content="I look."),
    _ROLE.case("a message of its own for each", f"{_ROLE.of(_GOOD)}<|message_sep|>\n\n{_ROLE.of(_GOOD)}",
               A, A),
    _ROLE.plain("nothing after the role", "function call<|role_sep|>\n"),
    _ROLE.plain("the role in prose", "A function call has a role."),
    _MARK.case("a mark: two calls", _MARK.of(_GOOD, _GOOD), A, A),
    _MARK.case("a mark: text around it", f"I look.\n{_MARK.of(_GOOD)}\nDone.", A, content="I look.Done."),
    _MARK.case("a mark: a bad call first", _MARK.of(_MARK.bad, _GOOD), A, content=_MARK.of(_MARK.bad)),
    _MARK.plain("a mark: a malformed call", _MARK.of(_MARK.malformed)),
    _MARK.case("a mark: a reply that ends before the last braces", _MARK.of(_GOOD)[:-2], A),
)  # fmt: skip
