"""Llama 3.2, Llama 4, Gemma 3: a bare list of Python's calls as the whole answer."""

from tests.output.corpus.lists import A, ListForm, list_cases
from tests.output.corpus.python_calls import BAD, GOOD, python_cases

_FORM = ListForm(writer="pythonic", opening="[", closing="]", good=GOOD, bad=BAD, malformed="read(path=)")

CASES = (
    *list_cases(_FORM),
    *python_cases(_FORM),
    _FORM.case("white space in front", f"\n\n [{GOOD}]\n", A),
    _FORM.case("Llama's marks", f"<|python_start|>[{GOOD}, {GOOD}]<|python_end|>", A, A),
    _FORM.case("Llama's marks after text", f"I look.<|python_start|>[{GOOD}]<|python_end|>", A,
               content="I look."),
    _FORM.case("Llama's last mark alone", f"[{GOOD}]<|python_end|>", A),
    _FORM.case("prose right after the list", f"[{GOOD}] is it.", A, content=" is it."),
    _FORM.plain("after text", f"Here: [{GOOD}]"),
    _FORM.plain("half an opener before a list", f"<|python_[{GOOD}]"),
    _FORM.plain("a call without a list", GOOD),
    _FORM.plain("numbers", "[1, 2]"),
    _FORM.plain("an empty list alone", "[]"),
    _FORM.plain("a task", "[x] read the file\n[ ] write it"),
    _FORM.plain("a link", "[read(2)](https://example.org) says so"),
    _FORM.plain("a link to a function", "[read(the path)](https://example.org)"),
    _FORM.plain("a footnote", "[^1]: a note"),
    _FORM.plain("a word in brackets", "[Applause]"),
    _FORM.plain("Python after Llama's mark", "<|python_start|>print([1])<|python_end|>"),
)  # fmt: skip
