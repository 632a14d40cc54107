"""Kimi K2: `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`.

Ours: mlx_lm's parser ends a call at the first end token, also inside a text, and takes Python literals.
"""

from __future__ import annotations

from functools import partial

from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.json_calls import ObjectReader, Objects
from start_llm.formats.thoughts import THINK_OF_KIMI
from start_llm.formats.writing.call_text import CallText

_END = r"(?:\s{0,64}<\|tool_call_end\|>)?\s{0,64}"
_OBJECTS = Objects(
    head=rf"(?:{_END}<\|tool_call_begin\|>)?"
    r"\s{0,64}(?:functions\.)?(?P<name>[\w.\-]{1,256})(?::\d{1,9})?\s{0,64}"
    r"<\|tool_call_argument_begin\|>\s{0,64}(?=\{)",
    next_call=_END + r"(?=<\|tool_call_begin\|>)",
    block_end=_END + r"<\|tool_calls_section_end\|>",
)

KIMI = ModelFormat(
    name="kimi",
    marks=("<|tool_calls_section_begin|>",),
    types=("kimi",),
    thought=THINK_OF_KIMI,
    call_ids="kimi",
    notations=(
        Notation(
            name="kimi",
            openers=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
            reader=partial(ObjectReader, _OBJECTS),
            text=CallText(
                mark="<|tool_call_begin|>",
                before="<|tool_calls_section_begin|>",
                head="<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>",
                tail="<|tool_call_end|>",
                after="<|tool_calls_section_end|>",
            ),
        ),
    ),
)
