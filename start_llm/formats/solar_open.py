"""Solar Open: `<|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{…}<|tool_call:end|>`.

Reasoning, an answer and calls are messages: `<|think|>…<|end|><|begin|>assistant<|content|>…`. Own parser,
because mlx_lm has none.
"""

from functools import partial

from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.json_calls import ObjectReader, Objects
from start_llm.formats.reasoning_marks import unmistakable
from start_llm.formats.writing.call_text import CallText

_OPENER, _BEGIN = "<|tool_calls|>", "<|tool_call:begin|>"
_NAME, _ARGUMENTS, _END = "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>"
_AFTER = r"(?:\s{0,64}<\|tool_call:end\|>)?\s{0,64}"
_NEXT = _AFTER + r"(?:<\|tool_calls\|>\s{0,64})?"
_OBJECTS = Objects(
    head=rf"(?:{_NEXT}<\|tool_call:begin\|>)?[^<>]{{0,64}}<\|tool_call:name\|>"
    r"\s{0,64}(?P<name>[\w.\-]{1,256})\s{0,64}<\|tool_call:args\|>\s{0,64}(?=\{)",
    next_call=_NEXT + r"(?=<\|tool_call:begin\|>)",
    block_end=_AFTER + r"<\|calls\|>",
)

SOLAR_OPEN = ModelFormat(
    name="solar_open",
    marks=(_BEGIN,),
    types=("solar_open",),
    reasoning=unmistakable("<|think|>", "<|end|><|begin|>assistant"),
    answer_marks=("<|content|>", "<|end|>"),
    notations=(
        Notation(
            name="solar_open",
            openers=(_OPENER, _BEGIN),
            reader=partial(ObjectReader, _OBJECTS),
            text=CallText(
                mark=_BEGIN,
                before=_OPENER,
                head=f"{_BEGIN}callNUMBER{_NAME}NAME{_ARGUMENTS}",
                tail=_END,
            ),
        ),
    ),
)
