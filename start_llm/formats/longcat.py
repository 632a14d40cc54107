"""LongCat: GLM's tags with other names, or a JSON object in a `<longcat_tool_call>`.

    <longcat_tool_call>NAME
    <longcat_arg_key>KEY</longcat_arg_key>
    <longcat_arg_value>VALUE</longcat_arg_value>
    </longcat_tool_call>

Own parser: mlx_lm's parser reads only finished blocks and ends a value at the first `</longcat_arg_value>`.
"""

from functools import partial

from start_llm.formats.glm import tags_of_keys_and_values
from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.json_calls import ObjectReader
from start_llm.formats.reading.lists import json_list
from start_llm.formats.reading.tagged import TaggedReader
from start_llm.formats.reasoning_marks import unmistakable
from start_llm.formats.writing.arguments import TaggedArguments
from start_llm.formats.writing.call_text import CallText

_OPENER, _END = "<longcat_tool_call>", "</longcat_tool_call>"
_KEY = "<longcat_arg_key>"

LONGCAT = ModelFormat(
    name="longcat",
    marks=(_OPENER,),
    types=("longcat",),
    reasoning=unmistakable("<longcat_think>", "</longcat_think>", cut="\n</longcat_think>\n"),
    notations=(
        Notation(
            name="longcat",
            openers=(_OPENER,),
            reader=partial(TaggedReader, tags_of_keys_and_values("longcat_")),
            text=CallText(
                mark=_KEY,
                head=f"{_OPENER}NAME\n",
                tail=_END,
                arguments=TaggedArguments(
                    key=f"{_KEY}KEY</longcat_arg_key>\n<longcat_arg_value>",
                    value_end="</longcat_arg_value>",
                    after="\n",
                ),
                between="\n",
            ),
        ),
        Notation(
            name="longcat_json",
            openers=(_OPENER,),
            reader=partial(ObjectReader, json_list(_END)),
            text=CallText(
                mark=_OPENER,
                head=f'{_OPENER}\n{{"name": "NAME", "arguments": ',
                tail=f"}}\n{_END}",
                between="\n",
            ),
        ),
    ),
)
