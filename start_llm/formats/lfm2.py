"""LFM2: `<|tool_call_start|>[NAME(key='text', number=1), NAME()]<|tool_call_end|>`, or a JSON list there.

LFM2.5 may end an answer with the list alone.

Own parser: mlx_lm's parser reads only finished blocks, guesses where a block is not Python, and accepts
tools that were not offered.
"""

from __future__ import annotations

from functools import partial

from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.json_calls import ObjectReader
from start_llm.formats.reading.lists import json_list
from start_llm.formats.reading.python_calls import PythonCallReader, call_list
from start_llm.formats.reasoning_marks import THINK
from start_llm.formats.writing.call_text import CallText
from start_llm.formats.writing.python_arguments import PythonArguments

_OPENER, _END = "<|tool_call_start|>", "<|tool_call_end|>"

LFM2 = ModelFormat(
    name="lfm2",
    marks=(_OPENER,),
    types=("lfm2",),
    reasoning=THINK,
    notations=(
        Notation(
            name="lfm2",
            openers=(_OPENER,),
            reader=partial(PythonCallReader, call_list(_END)),
            last_list=partial(PythonCallReader, call_list()),
            text=CallText(
                mark=_OPENER,
                before=f"{_OPENER}[",
                head="NAME",
                tail="",
                arguments=PythonArguments(),
                between=", ",
                after=f"]{_END}",
            ),
        ),
        Notation(
            name="lfm2_list",
            openers=(_OPENER,),
            reader=partial(ObjectReader, json_list(_END)),
            text=CallText(
                mark=f'{_OPENER}[{{"name"',
                before=f"{_OPENER}[",
                head='{"name": "NAME", "arguments": ',
                tail="}",
                between=", ",
                after=f"]{_END}",
            ),
        ),
    ),
)
