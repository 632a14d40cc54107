"""Kimi K2: `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`.

Own parser: mlx_lm's parser ends a call at the first end token, even inside a text, and accepts Python
literals.
"""

from dataclasses import replace
from functools import partial

from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.json_calls import ObjectReader, Objects
from start_llm.formats.reasoning_marks import THINK
from start_llm.formats.writing.call_text import CallText

_OPENER = "<|tool_calls_section_begin|>"
_MISSPELT = "<|tool_call_section_begin|>"
_END = r"(?:\s{0,64}<\|tool_call_end\|>)?\s{0,64}"
_OBJECTS = Objects(
    head=rf"(?:{_END}<\|tool_call_begin\|>)?"
    r"\s{0,64}(?:functions\.)?(?P<name>[\w.\-]{1,256})(?::\d{1,9})?\s{0,64}"
    r"<\|tool_call_argument_begin\|>\s{0,64}(?=\{)",
    next_call=_END + r"(?=<\|tool_call_begin\|>)",
    block_end=_END + r"<\|tool_calls?_section_end\|>",
)

KIMI = ModelFormat(
    name="kimi",
    marks=(_OPENER,),
    types=("kimi",),
    reasoning=replace(THINK, ended_by=(_OPENER, _MISSPELT)),
    call_ids="kimi",
    notations=(
        Notation(
            name="kimi",
            openers=(_OPENER, _MISSPELT, "<|tool_call_begin|>"),
            reader=partial(ObjectReader, _OBJECTS),
            text=CallText(
                mark="<|tool_call_begin|>",
                before=_OPENER,
                head="<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>",
                tail="<|tool_call_end|>",
                after="<|tool_calls_section_end|>",
            ),
        ),
    ),
)
