"""Apriel: `<tool_calls>[{"name": NAME, "arguments": {…}}]</tool_calls>`, and sentences around its reasoning.

    Here are my reasoning steps:
    …
    [BEGIN FINAL RESPONSE]
    …
    [END FINAL RESPONSE]

Own parser, because mlx_lm has none.
"""

from __future__ import annotations

from functools import partial

from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.json_calls import ObjectReader
from start_llm.formats.reading.lists import json_list
from start_llm.formats.reasoning_marks import unmistakable
from start_llm.formats.writing.call_text import CallText

_BEGIN, _END = "[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"
_REASONING = unmistakable("Here are my reasoning steps:", _BEGIN, cut=f"\n{_BEGIN}\n")

APRIEL = ModelFormat(
    name="apriel",
    marks=(_BEGIN,),
    types=("apriel",),
    reasoning=_REASONING,
    answer_marks=(_END,),
    notations=(
        Notation(
            name="apriel",
            openers=("<tool_calls>",),
            reader=partial(ObjectReader, json_list("</tool_calls>")),
            text=CallText(
                mark=_BEGIN,
                before="<tool_calls>[",
                head='{"name": "NAME", "arguments": ',
                tail="}",
                between=", ",
                after="]</tool_calls>",
            ),
        ),
    ),
)
