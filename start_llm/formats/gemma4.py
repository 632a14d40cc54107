"""Gemma 4: `<|tool_call>call:NAME{key:<|"|>text<|"|>,number:1}<tool_call|>`, or the call without its marks.

Own parser: mlx_lm's parser misses braces in texts that are cut, loses valid calls before a malformed one, and
accepts tools that were not offered.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.gemma import GemmaReader
from start_llm.formats.reasoning_marks import unmistakable
from start_llm.formats.writing.call_text import CallText
from start_llm.formats.writing.gemma_arguments import GemmaArguments

_QUOTE = '<|"|>'
_REASONING = replace(
    unmistakable("<|channel>thought", "<channel|>", cut="\n<channel|>"),
    label="thought",
)

GEMMA4 = ModelFormat(
    name="gemma4",
    marks=("<|channel>", "<|tool_call>"),
    types=("gemma4",),
    reasoning=_REASONING,
    notations=(
        Notation(
            name="gemma4",
            openers=("<|tool_call>",),
            bare=("call:",),
            after_call=("<|tool_response>",),
            reader=partial(GemmaReader, _QUOTE, "<tool_call|>"),
            text=CallText(
                mark="<|tool_call>",
                head="<|tool_call>call:NAME",
                tail="<tool_call|>",
                arguments=GemmaArguments(_QUOTE),
            ),
        ),
    ),
)
