"""MiniCPM: `<function name="NAME"><param name="KEY">VALUE</param></function>`, markup inside CDATA.

Own parser: mlx_lm's parser reads only finished blocks, ends a value at the first `</param>` and strips
values.
"""

from functools import partial

from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.tagged import TaggedReader, Tags
from start_llm.formats.reasoning_marks import THINK
from start_llm.formats.writing.arguments import TaggedArguments
from start_llm.formats.writing.call_text import CallText

_TAGS = Tags(
    head=r"\s{0,64}name\s{0,64}=\s{0,64}[\"'](?P<name>[^<>\"'\n]{1,256})[\"']\s{0,64}>",
    key=r"\s{0,64}<param\s{1,64}name\s{0,64}=\s{0,64}[\"'](?P<key>[^<>\"'\n]{1,256})[\"']\s{0,64}>",
    value_end="</param>",
    end=r"\s{0,64}</function>",
    another=r"<function\s{1,64}name\s{0,64}=\s{0,64}[\"'](?P<tool>[^<>\"'\n]{1,256})[\"']\s{0,64}>",
    has_lines=False,
    wrapper=("<![CDATA[", "]]>"),
)

MINICPM = ModelFormat(
    name="minicpm",
    marks=('<function name="',),
    types=("minicpm",),
    reasoning=THINK,
    notations=(
        Notation(
            name="minicpm",
            openers=("<function ",),
            reader=partial(TaggedReader, _TAGS),
            text=CallText(
                mark='<function name="',
                head='<function name="NAME">',
                tail="</function>",
                arguments=TaggedArguments(
                    key='<param name="KEY">', value_end="</param>", wrapper=("<![CDATA[", "]]>")
                ),
                between="\n",
            ),
        ),
    ),
)
