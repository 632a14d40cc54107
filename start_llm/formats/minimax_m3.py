"""MiniMax-M3: `<tool_call><invoke name="NAME"><KEY>VALUE</KEY></invoke>…`, with a mark before every tag.

The tag of an argument is the argument's name. An array contains `<item>` elements; an object contains one
element per member.

Own parser, because mlx_lm has none.
"""

from functools import partial

import regex

from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.nested import decode_nested
from start_llm.formats.reading.tagged import TaggedReader, Tags
from start_llm.formats.reasoning_marks import unmistakable
from start_llm.formats.writing.call_text import CallText
from start_llm.formats.writing.nested_arguments import NestedArguments

_MARK = "]<]minimax[>["
_OPENER, _END = f"{_MARK}<tool_call>", f"{_MARK}</tool_call>"
_TAG = regex.escape(_MARK, literal_spaces=True)
_TAGS = Tags(
    head=rf"\s{{0,64}}{_TAG}<invoke\s{{1,64}}name=\"(?P<name>[^<>\"\n]{{1,256}})\"\s{{0,64}}>",
    key=rf"\s{{0,64}}{_TAG}<(?!/|invoke\s|tool_call>)(?P<key>[^<>\n]{{1,256}})>",
    value_end=f"{_MARK}</KEY>",
    end=rf"\s{{0,64}}{_TAG}</(?:invoke|tool_call)>",
    another=rf"(?:{_TAG}<tool_call>\s{{0,64}})?{_TAG}<invoke\s{{1,64}}name=\"(?P<tool>[^<>\"\n]{{1,256}})\"\s{{0,64}}>",
    has_lines=False,
    next_call=rf"\s{{0,64}}(?={_TAG}<invoke\s)",
    block_end=rf"\s{{0,64}}{_TAG}</tool_call>",
    nested=(f"{_MARK}<", f"{_MARK}</"),
    decode=partial(decode_nested, _TAG),
)

MINIMAX_M3 = ModelFormat(
    name="minimax_m3",
    marks=(_MARK,),
    types=("minimax_m3",),
    reasoning=unmistakable("<mm:think>", "</mm:think>"),
    notations=(
        Notation(
            name="minimax_m3",
            openers=(_OPENER,),
            reader=partial(TaggedReader, _TAGS),
            text=CallText(
                mark=_MARK,
                before=f"{_OPENER}\n",
                head=f'{_MARK}<invoke name="NAME">',
                tail=f"{_MARK}</invoke>\n",
                arguments=NestedArguments(_MARK),
                after=_END,
            ),
        ),
    ),
)
