"""MiniMax-M1: `{"name": NAME, "arguments": {…}}` line by line between `<tool_calls>` and `</tool_calls>`.

Ours: mlx_lm has no parser for them.
"""

from __future__ import annotations

from functools import partial

from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.json_calls import ObjectReader
from start_llm.formats.reading.lists import json_list
from start_llm.formats.thoughts import THINK
from start_llm.formats.writing.call_text import CallText

MINIMAX_M1 = ModelFormat(
    name="minimax_m1",
    marks=("<tool_calls>",),
    types=("minimax_m1",),
    thought=THINK,
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
