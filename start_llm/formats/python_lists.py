"""Formats whose calls are written as Python's: `NAME(key='text', number=1)`."""

from functools import partial

from start_llm.formats.json_lists import listed
from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.python_calls import PythonCallReader, call_lines, call_list
from start_llm.formats.reasoning_marks import THINK
from start_llm.formats.writing.call_text import CallText
from start_llm.formats.writing.python_arguments import PythonArguments


def _text(before: str, after: str, *, mark: str, between: str = ", ") -> CallText:
    return CallText(
        mark=mark,
        before=before,
        head="NAME",
        tail="",
        arguments=PythonArguments(),
        between=between,
        after=after,
    )


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
            text=_text("[", "]", mark=""),
        ),
    ),
)
"""Llama 3.2, Llama 4 and Gemma 3 where a template asks for Python: a bare `[NAME(key='text'), NAME()]`.

Llama 4 may put it between `<|python_start|>` and `<|python_end|>`. Own parser: mlx_lm's parser only accepts
text between LFM2's marks.
"""

_OLMO3, _OLMO3_END = "<function_calls>", "</function_calls>"
OLMO3 = ModelFormat(
    name="olmo3",
    marks=(_OLMO3,),
    types=("olmo3",),
    reasoning=THINK,
    notations=(
        Notation(
            name="olmo3",
            openers=(_OLMO3,),
            reader=partial(PythonCallReader, call_lines(_OLMO3_END)),
            text=_text(_OLMO3, _OLMO3_END, mark=_OLMO3, between="\n"),
        ),
    ),
)
"""Olmo 3: `<function_calls>NAME(key="text")`, one call per line, `</function_calls>`.

Own parser, because mlx_lm has none.
"""

_LFM2, _LFM2_END = "<|tool_call_start|>", "<|tool_call_end|>"
LFM2 = ModelFormat(
    name="lfm2",
    marks=(_LFM2,),
    types=("lfm2",),
    reasoning=THINK,
    notations=(
        Notation(
            name="lfm2",
            openers=(_LFM2,),
            reader=partial(PythonCallReader, call_list(_LFM2_END)),
            last_list=partial(PythonCallReader, call_list()),
            text=_text(f"{_LFM2}[", f"]{_LFM2_END}", mark=_LFM2),
        ),
        listed("lfm2_list", _LFM2, _LFM2_END, mark=f'{_LFM2}[{{"name"'),
    ),
)
"""LFM2: `<|tool_call_start|>[NAME(key='text', number=1), NAME()]<|tool_call_end|>`, or a JSON list there.

LFM2.5 may end an answer with the list alone. Own parser: mlx_lm's parser reads only finished blocks, guesses
where a block is not Python, and accepts tools that were not offered.
"""
