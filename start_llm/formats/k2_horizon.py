"""K2 Horizon: GLM's tags with `ifm|` in front, several calls in one block, and perhaps the type of a value.

    <ifm|tool_calls>
    <ifm|tool_call>NAME
    <ifm|arg_key>KEY</ifm|arg_key>
    <ifm|arg_type>TYPE</ifm|arg_type>
    <ifm|arg_value>VALUE</ifm|arg_value>
    </ifm|tool_call>
    </ifm|tool_calls>

A template option makes the calls JSON objects. Reasoning of lower efforts has marks of its own, which are not
read: `<ifm|think_fast>`, `<ifm|think_faster>`. Own parser, because mlx_lm has none.
"""

from dataclasses import replace
from functools import partial

from start_llm.formats.glm import tags_of_keys_and_values
from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.json_calls import ObjectReader, Objects
from start_llm.formats.reading.tagged import TaggedReader
from start_llm.formats.reasoning_marks import unmistakable
from start_llm.formats.writing.arguments import TaggedArguments
from start_llm.formats.writing.call_text import CallText

_BLOCK, _BLOCK_END = "<ifm|tool_calls>", "</ifm|tool_calls>"
_CALL, _CALL_END = "<ifm|tool_call>", "</ifm|tool_call>"
_OPENERS = (_BLOCK, _CALL)
_NEXT, _FIRST = r"\s{0,64}(?=<ifm\|tool_call>)", r"(?:\s{0,64}<ifm\|tool_call>)?"
_END = r"\s{0,64}</ifm\|tool_calls>"
_GLM = tags_of_keys_and_values("ifm|")
_TAGS = replace(
    _GLM,
    head=_FIRST + _GLM.head,
    key=r"\s{0,64}<ifm\|arg_key>(?P<key>[^<>]{1,256})</ifm\|arg_key>"
    r"(?:\s{0,64}<ifm\|arg_type>(?P<type>\w{1,64})</ifm\|arg_type>)?\s{0,64}<ifm\|arg_value>",
    another=rf"(?:<ifm\|tool_calls>\s{{0,64}})?{_GLM.another}",
    text_type="string",
    next_call=_NEXT,
    block_end=_END,
)
_AFTER_OBJECT = r"(?:\s{0,64}</ifm\|tool_call>)?"
_OBJECTS = Objects(
    head=rf"{_AFTER_OBJECT}{_FIRST}\s{{0,64}}(?=\{{)",
    next_call=_AFTER_OBJECT + _NEXT,
    block_end=_AFTER_OBJECT + _END,
)

K2_HORIZON = ModelFormat(
    name="k2_horizon",
    marks=_OPENERS,
    types=("k2_horizon",),
    reasoning=unmistakable("<ifm|think>", "</ifm|think>"),
    notations=(
        Notation(
            name="k2_horizon",
            openers=_OPENERS,
            reader=partial(TaggedReader, _TAGS),
            text=CallText(
                mark="<ifm|arg_key>",
                before=f"{_BLOCK}\n",
                head=f"{_CALL}NAME\n",
                tail=f"{_CALL_END}\n",
                arguments=TaggedArguments(
                    key="<ifm|arg_key>KEY</ifm|arg_key>\n<ifm|arg_value>",
                    value_end="</ifm|arg_value>",
                    after="\n",
                ),
                after=_BLOCK_END,
            ),
        ),
        Notation(
            name="k2_horizon_json",
            openers=_OPENERS,
            reader=partial(ObjectReader, _OBJECTS),
            text=CallText(
                mark=_CALL,
                before=f"{_BLOCK}\n",
                head=f'{_CALL}{{"name": "NAME", "arguments": ',
                tail=f"}}{_CALL_END}\n",
                after=_BLOCK_END,
            ),
        ),
    ),
)
