"""Granite 3 and Phi 4: a JSON list after a mark, with an end or without, or after a word."""

from tests.output.corpus.case import NO_TOOLS, Case
from tests.output.corpus.lists import A, ListForm, list_cases
from tests.output.corpus.writers import WRITERS

_GRANITE = ListForm(writer="granite", opening="<|tool_call|>[", closing="]")
_PHI = ListForm(writer="phi4", opening="<|tool_call|>[", closing="]<|/tool_call|>")
_FUNCTOOLS = ListForm(writer="functools", opening="functools[", closing="]")
_GOOD = _GRANITE.good

CASES = (
    *list_cases(_GRANITE),
    _GRANITE.case("the end that Phi has", _PHI.of(_GOOD), A),
    _GRANITE.case("text around a list", f"I look.\n{_GRANITE.of(_GOOD)} so", A, content="I look. so"),
    _GRANITE.case("no space after the mark", f"<|tool_call|>{_GOOD}", A),
)
"""Phi's end is read after Granite's lists, so what is attacked there holds here."""

_TEXT = "Write functools[1] or functools."
CASES = (
    *CASES,
    _FUNCTOOLS.case("functools: white space", f" \nfunctools[ {_GOOD} ]", A),
    _FUNCTOOLS.case("functools: no end", f"functools[{_GOOD}, {_GOOD}", A, A),
    _FUNCTOOLS.case("functools: a bad call last", _FUNCTOOLS.of(_GOOD, _FUNCTOOLS.bad), A,
                    content=f", {_FUNCTOOLS.bad}]"),
    _FUNCTOOLS.case("functools: after text", f"I look. {_FUNCTOOLS.of(_GOOD)}", A, content="I look."),
    _FUNCTOOLS.case("functools: between texts", f"I look.\n{_FUNCTOOLS.of(_GOOD)}\nThere.", A,
                    content="I look.There."),
    _FUNCTOOLS.plain("functools: in prose", _TEXT),
    _FUNCTOOLS.plain("functools: at the start of prose", "functools[0] is the first one"),
    _FUNCTOOLS.plain("functools: half the word", "func"),
    _FUNCTOOLS.plain("functools: another bracket", f"functools({_GOOD})"),
    _FUNCTOOLS.plain("functools: nothing called", "functools[]"),
    Case(name="functools: no tools", text=_FUNCTOOLS.of(_GOOD), content=_FUNCTOOLS.of(_GOOD),
         family=WRITERS["functools"].family, tools=NO_TOOLS),
)  # fmt: skip
