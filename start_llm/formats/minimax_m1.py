"""MiniMax-M1: `{"name": NAME, "arguments": {…}}`, one per line between `<tool_calls>` and `</tool_calls>`.

Own parser, because mlx_lm has none.
"""

from __future__ import annotations

from functools import partial

from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.json_calls import ObjectReader
from start_llm.formats.reading.lists import json_list
from start_llm.formats.reasoning_marks import THINK
from start_llm.formats.writing.call_text import CallText

MINIMAX_M1 = ModelFormat(
    name="minimax_m1",
    marks=("<tool_calls>",),
    types=("minimax_m1",),
    reasoning=THINK,
    notations=(
        Notation(
            name="minimax_m1",
            openers=("<tool_calls>",),
            reader=partial(ObjectReader, json_list("</tool_calls>")),
            text=CallText(
                mark="<tool_calls>",
                before="<tool_calls>\n",
                head='{"name": "NAME", "arguments": ',
                tail="}",
                between="\n",
                after="\n</tool_calls>",
            ),
        ),
    ),
)
