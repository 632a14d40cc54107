"""Olmo 3: `<function_calls>NAME(key="text")`, one call per line, `</function_calls>`.

Own parser, because mlx_lm has none.
"""

from __future__ import annotations

from functools import partial

from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.python_calls import PythonCallReader, call_lines
from start_llm.formats.reasoning_marks import THINK
from start_llm.formats.writing.call_text import CallText
from start_llm.formats.writing.python_arguments import PythonArguments

_OPENER, _END = "<function_calls>", "</function_calls>"

OLMO3 = ModelFormat(
    name="olmo3",
    marks=(_OPENER,),
    types=("olmo3",),
    reasoning=THINK,
    notations=(
        Notation(
            name="olmo3",
            openers=(_OPENER,),
            reader=partial(PythonCallReader, call_lines(_END)),
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
