"""ERNIE 4.5: Hermes' calls behind reasoning, and marks around the answer (more in `reasoning`)."""

from start_llm.formats.registry import family_by_name
from tests.output.corpus.case import Call, Case

_FAMILY = family_by_name("ernie")
_CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>\n'
A = Call("read", {"path": "a"})

CASES = (
    Case(name="calls after reasoning", text=f"Hm.\n</think>\n\n{_CALL}{_CALL}", reasoning="Hm.",
         calls=(A, A), reasoning_is_open=True, family=_FAMILY),
    Case(name="an answer and a call", text=f"<response>\nI look.\n</response>\n\n{_CALL}",
         content="I look.", calls=(A,), family=_FAMILY),
)  # fmt: skip
