"""Mistral: `[TOOL_CALLS][{"name": NAME, "arguments": {…}}]`; newer models write `[TOOL_CALLS]NAME[ARGS]{…}`.

`[ARGS]` is optional. Own parser: mlx_lm's parser loses every call of a block if one is malformed, and accepts
tools that were not offered.
"""

from functools import partial

from start_llm.formats.json_lists import listed
from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.json_calls import ObjectReader, Objects
from start_llm.formats.reasoning_marks import unmistakable
from start_llm.formats.writing.call_text import CallText

_OPENER = "[TOOL_CALLS]"
_HEADED = Objects(
    head=r"\s{0,64}(?P<name>[\w.\-]{1,256})(?:\[CALL_ID\][^\[\]]{0,64})?(?:\[ARGS\])?\s{0,64}(?=\{)"
)

MISTRAL = ModelFormat(
    name="mistral",
    marks=(_OPENER,),
    types=("mistral", "ministral"),
    reasoning=unmistakable("[THINK]", "[/THINK]"),
    call_ids="nine",
    notations=(
        Notation(
            name="mistral_headed",
            openers=(_OPENER,),
            reader=partial(ObjectReader, _HEADED),
            text=CallText(mark="[ARGS]", head="[TOOL_CALLS]NAME[ARGS]", tail=""),
        ),
        listed("mistral_list", _OPENER),
    ),
)
