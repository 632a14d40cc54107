"""MiniMax-M2: `<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>…`.

Own parser: mlx_lm's parser reads only finished blocks, ends a value at the first `</parameter>` and strips
values.
"""

from dataclasses import replace
from functools import partial

from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.tagged import TaggedReader, Tags
from start_llm.formats.reasoning_marks import THINK
from start_llm.formats.writing.arguments import TaggedArguments
from start_llm.formats.writing.call_text import CallText

_OPENER = "<minimax:tool_call>"
_END = "</minimax:tool_call>"
_NAMED = r"\s{1,64}name\s{0,64}=\s{0,64}[\"']?"
_TAGS = Tags(
    head=rf"\s{{0,64}}<invoke{_NAMED}(?P<name>[^<>\"'\n]{{1,256}})[\"']?\s{{0,64}}>",
    key=rf"\s{{0,64}}<parameter{_NAMED}(?P<key>[^<>\"'\n]{{1,256}})[\"']?\s{{0,64}}>",
    value_end="</parameter>",
    end=rf"\s{{0,64}}(?:</invoke>|{_END})",
    another=rf"(?:{_OPENER}\s{{0,64}})?<invoke{_NAMED}(?P<tool>[^<>\"'\n]{{1,256}})[\"']?\s{{0,64}}>",
    next_call=r"\s{0,64}(?=<invoke\s)",
    block_end=rf"\s{{0,64}}{_END}",
)

MINIMAX = ModelFormat(
    name="minimax",
    marks=(_OPENER,),
    types=("minimax",),
    reasoning=THINK,
    notations=(
        Notation(
            name="minimax",
            openers=(_OPENER,),
            reader=partial(TaggedReader, _TAGS),
            text=CallText(
                mark=_OPENER,
                before=f"{_OPENER}\n",
                head='<invoke name="NAME">\n',
                tail="</invoke>\n",
                arguments=TaggedArguments(key='<parameter name="KEY">', value_end="</parameter>", after="\n"),
                after=_END,
            ),
        ),
    ),
)
_CALLS = "<function_calls>"
_CALLS_END = "</function_calls>"
MINIMAX_READ_ONLY = (
    Notation(
        name="function_calls",
        openers=(_CALLS,),
        reader=partial(
            TaggedReader,
            replace(
                _TAGS,
                end=rf"\s{{0,64}}(?:</invoke>|{_CALLS_END})",
                another=_TAGS.another.replace(_OPENER, _CALLS),
                block_end=rf"\s{{0,64}}{_CALLS_END}",
            ),
        ),
    ),
)
"""What models write that have learnt from Claude's replies."""
