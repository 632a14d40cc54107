"""Llama 3.2, Llama 4 and Gemma 3 where a template asks for Python: a bare `[NAME(key='text'), NAME()]`.

Llama 4 may put it between `<|python_start|>` and `<|python_end|>`. Own parser: mlx_lm's parser only accepts
text between LFM2's marks.
"""

from __future__ import annotations

from functools import partial

from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.python_calls import PythonCallReader, call_list
from start_llm.formats.writing.call_text import CallText
from start_llm.formats.writing.python_arguments import PythonArguments

PYTHONIC = ModelFormat(
    name="llama4",
    marks=("<|python_start|>", "[func_name1("),
    types=("llama4",),
    notations=(
        Notation(
            name="pythonic",
            openers=("<|python_start|>",),
            bare=("[",),
            reader=partial(PythonCallReader, call_list("<|python_end|>")),
            text=CallText(
                mark="",
                before="[",
                head="NAME",
                tail="",
                arguments=PythonArguments(),
                between=", ",
                after="]",
            ),
        ),
    ),
)
