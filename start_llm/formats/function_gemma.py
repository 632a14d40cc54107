"""FunctionGemma: `<start_function_call>call:NAME{key:<escape>text<escape>,number:1}<end_function_call>`.

Own parser: mlx_lm's parser ends a call at its first closing brace and returns only the first call.
"""

from __future__ import annotations

from functools import partial

from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.gemma import GemmaReader
from start_llm.formats.writing.call_text import CallText
from start_llm.formats.writing.gemma_arguments import GemmaArguments

_QUOTE = "<escape>"

FUNCTION_GEMMA = ModelFormat(
    name="function_gemma",
    marks=("<start_function_call>",),
    types=("function_gemma",),
    notations=(
        Notation(
            name="function_gemma",
            openers=("<start_function_call>",),
            reader=partial(GemmaReader, _QUOTE, "<end_function_call>"),
            text=CallText(
                mark="<start_function_call>",
                head="<start_function_call>call:NAME",
                tail="<end_function_call>",
                arguments=GemmaArguments(_QUOTE),
            ),
        ),
    ),
)
