"""Olmo 3: `<function_calls>NAME(key="text")` and a line for each further call, `</function_calls>`.

Ours: mlx_lm has no parser for them.
"""

from __future__ import annotations

from functools import partial

from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.json_calls import ObjectReader
from start_llm.formats.reading.pythonic import call_lines
from start_llm.formats.thoughts import THINK
from start_llm.formats.writing.call_text import CallText
from start_llm.formats.writing.python_arguments import PythonArguments

_OPENER, _END = "<function_calls>", "</function_calls>"

OLMO3 = ModelFormat(
    name="olmo3",
    marks=(_OPENER,),
    types=("olmo3",),
    thought=THINK,
    notations=(
        Notation(
            name="olmo3",
            openers=(_OPENER,),
            reader=partial(ObjectReader, call_lines(_END)),
            text=CallText(
                mark=_OPENER,
                before=_OPENER,
                head="NAME",
                tail="",
                arguments=PythonArguments(),
                between="\n",
                after=_END,
            ),
        ),
    ),
)
