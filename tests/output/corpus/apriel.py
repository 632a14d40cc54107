"""Apriel: a JSON list between tags, and sentences around the reasoning."""

from start_llm.formats.registry import family_by_name
from tests.output.corpus.case import Case
from tests.output.corpus.lists import A, ListForm, list_cases

_FORM = ListForm(writer="apriel", opening="<tool_calls>[", closing="]</tool_calls>")
_FAMILY = family_by_name("apriel")
_BEGIN, _END = "[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"


def _case(name: str, text: str, **more) -> Case:
    return Case(name=name, text=text, family=_FAMILY, **more)


CASES = (
    *list_cases(_FORM),
    _case("reasoning and an answer", f"Here are my reasoning steps:\nHm.\n{_BEGIN}\nDone.\n{_END}",
          reasoning="Hm.", content="Done.\n"),
    _case("reasoning that the prompt opened", f"\nHm.\n{_BEGIN}\nDone.", reasoning="Hm.", content="Done.",
          reasoning_is_open=True),
    _case("reasoning and a call", f"\nHm.\n{_BEGIN}\n{_FORM.of(_FORM.good)}\n{_END}", reasoning="Hm.",
          calls=(A,), reasoning_is_open=True),
    _case("an answer alone", f"Done.\n{_END}", content="Done.\n"),
)  # fmt: skip
