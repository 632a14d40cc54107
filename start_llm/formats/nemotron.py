"""Nemotron Nano 2: `<TOOLCALL>[{"name": NAME, "arguments": {…}}]</TOOLCALL>`.

Own parser, because mlx_lm has none.
"""

from __future__ import annotations

from functools import partial

from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.json_calls import ObjectReader
from start_llm.formats.reading.lists import json_list
from start_llm.formats.reasoning_marks import THINK
from start_llm.formats.writing.call_text import CallText

NEMOTRON = ModelFormat(
    name="nemotron_h",
    marks=("<TOOLCALL>",),
    types=("nemotron_h",),
    reasoning=THINK,
    notations=(
        Notation(
            name="toolcall",
            openers=("<TOOLCALL>",),
            reader=partial(ObjectReader, json_list("</TOOLCALL>")),
            text=CallText(
                mark="<TOOLCALL>",
                before="<TOOLCALL>[",
                head='{"name": "NAME", "arguments": ',
                tail="}",
                between=", ",
                after="]</TOOLCALL>",
            ),
        ),
    ),
)
