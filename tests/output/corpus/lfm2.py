"""LFM2: a list of Python's calls between marks, or of JSON."""

from dataclasses import replace

from tests.output.corpus.case import NO_TOOLS, Call
from tests.output.corpus.lists import A, ListForm, list_cases
from tests.output.corpus.python_calls import BAD, GOOD, python_cases

_FORM = ListForm(
    writer="lfm2",
    opening="<|tool_call_start|>[",
    closing="]<|tool_call_end|>",
    good=GOOD,
    bad=BAD,
    bad_call=Call("remove", {"path": "/"}),
    malformed="read(path=)",
)
_JSON = ListForm(writer="lfm2_list", opening=_FORM.opening, closing=_FORM.closing)

CASES = (
    *list_cases(_FORM),
    *python_cases(_FORM),
    _FORM.case("no brackets", f"<|tool_call_start|>{GOOD}<|tool_call_end|>", A),
    _FORM.case("white space everywhere", _FORM.of(f" {GOOD} ,\n {GOOD} ").replace("]", "] "), A, A),
    _FORM.case("two blocks", f"{_FORM.of(GOOD)}\n{_FORM.of(GOOD)}", A, A),
    _FORM.case("text around a list", f"I look.\n{_FORM.of(GOOD)}Done.", A, content="I look.Done."),
    _FORM.case("prose after half the end", f"<|tool_call_start|>[{GOOD}] Done.", A, content=" Done."),
    _FORM.case("another mark for the end", f"<|tool_call_start|>[{GOOD}]<|tool_end|>", A,
               content="<|tool_end|>"),
    _FORM.case("no call after the comma", f"<|tool_call_start|>[{GOOD}, 5]<|tool_call_end|>", A),
    _FORM.case("a position in the second call", _FORM.of(GOOD, "read('b')"), A,
               Call("read", {"path": "b"})),
    _FORM.case("a bare list behind prose", f"I look. [{GOOD}]", A, content="I look."),
    _FORM.case("two calls behind prose", f"I look.\n\n[{GOOD}, {GOOD}]\n", A, A, content="I look."),
    _FORM.case("a bare list behind links", f"[x](y) [read](z) [{GOOD}]", A, content="[x](y) [read](z)"),
    _FORM.plain("prose behind a bare list", f"See [{GOOD}] for it."),
    _FORM.plain("two bare lists in prose", f"So [{GOOD}] and [{GOOD}]"),
    _FORM.plain("a bare list in a fence", f"```\n[{GOOD}]\n```"),
    _FORM.plain("a bare list in inline code", f"It is `[{GOOD}]`"),
    _FORM.plain("a bare list in quotation marks", f'It is "[{GOOD}]"'),
    _FORM.plain("a bare list without its bracket", f"I look. [{GOOD}"),
    _FORM.plain("a bare list with positions", "I look. [read('a')]"),
    _FORM.plain("a bare list of no tool", f"I look. [{BAD}]"),
    _FORM.plain("a bare list with a call of no tool", f"I look. [{GOOD}, {BAD}]"),
    replace(_FORM.plain("a bare list without tools", f"I look. [{GOOD}]"), tools=NO_TOOLS),
    replace(_FORM.plain("a bare list that a limit cuts off", f"I look. [{GOOD}]"), complete=False),
    _FORM.plain("markup in prose", "`<|tool_call_start|>[read(path=…)]<|tool_call_end|>` makes a call."),
    _JSON.case("JSON: two calls", _JSON.of(_JSON.good, _JSON.good), A, A),
    _JSON.case("JSON: no brackets", f"<|tool_call_start|>{_JSON.good}<|tool_call_end|>", A),
    _JSON.plain("JSON: a malformed call", _JSON.of(_JSON.malformed)),
    _JSON.plain("JSON and Python", _JSON.of(_JSON.malformed, "5")),
)  # fmt: skip
