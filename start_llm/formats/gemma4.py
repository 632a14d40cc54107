"""Gemma 4, and FunctionGemma with other marks.

    <|tool_call>call:NAME{key:<|"|>text<|"|>,number:1}<tool_call|>, or the call without its marks
    <start_function_call>call:NAME{key:<escape>text<escape>,number:1}<end_function_call>

Own parser: mlx_lm's parsers miss braces in texts that are cut, lose valid calls before a malformed one,
accept tools that were not offered, end a call at its first closing brace, and return only the first call.
"""

from dataclasses import replace
from functools import partial

from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.gemma import GemmaReader
from start_llm.formats.reasoning_marks import unmistakable
from start_llm.formats.writing.call_text import CallText
from start_llm.formats.writing.gemma_arguments import GemmaArguments

_QUOTE = '<|"|>'

GEMMA4 = ModelFormat(
    name="gemma4",
    marks=("<|channel>", "<|tool_call>"),
    types=("gemma4",),
    reasoning=replace(unmistakable("<|channel>thought", "<channel|>", cut="\n<channel|>"), label="thought"),
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
_ESCAPE = "<escape>"
FUNCTION_GEMMA = ModelFormat(
    name="function_gemma",
    marks=("<start_function_call>",),
    types=("function_gemma",),
    notations=(
        Notation(
            name="function_gemma",
            openers=("<start_function_call>",),
            reader=partial(GemmaReader, _ESCAPE, "<end_function_call>"),
            text=CallText(
                mark="<start_function_call>",
                head="<start_function_call>call:NAME",
                tail="<end_function_call>",
                arguments=GemmaArguments(_ESCAPE),
            ),
        ),
    ),
)
