"""xLAM: a bare JSON list as the whole answer."""

from tests.output.corpus.case import Call
from tests.output.corpus.lists import A, ListForm, list_cases

_FORM = ListForm(writer="xlam", opening="[", closing="]")
_GOOD = _FORM.good

CASES = (
    *list_cases(_FORM),
    _FORM.case("white space in front", f"\n [\n  {_GOOD},\n  {_GOOD}\n]\n", A, A),
    _FORM.case("parameters before the name", '[{"parameters": {"path": "a"}, "name": "read"}]', A),
    _FORM.case("brackets in a value", _FORM.of(_GOOD.replace('"a"', '"]}["')), Call("read", {"path": "]}["})),
    _FORM.plain("after text", f"Here: {_FORM.of(_GOOD)}"),
    _FORM.plain("an answer in JSON", '[{"path": "a"}, {"path": "b"}]'),
    _FORM.plain("an answer with names", '[{"name": "Ada", "born": 1815}, {"name": "Grace"}]'),
    _FORM.plain("an answer that names a tool", '[{"name": "list"}]'),
    _FORM.plain("numbers", "[1, 2]"),
    _FORM.plain("a task", "[x] read the file\n[ ] write it"),
    _FORM.plain("a link", "[read](https://example.org) it"),
    _FORM.plain("a footnote", "[1]: a note"),
    _FORM.plain("a bracket alone", "["),
)
