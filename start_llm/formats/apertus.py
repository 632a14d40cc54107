"""Apertus: `<|tools_prefix|>[{NAME: {…}}, {NAME: {…}}]<|tools_suffix|>`.

Own parser, because mlx_lm has none.
"""

from functools import partial

from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.json_calls import ObjectReader, Objects
from start_llm.formats.reading.lists import list_end
from start_llm.formats.reasoning_marks import unmistakable
from start_llm.formats.writing.call_text import CallText

_OPENER, _END = "<|tools_prefix|>", "<|tools_suffix|>"
_SPACE = r"\s{0,64}"
_CALL = rf"{_SPACE}\{{{_SPACE}\"(?P<name>[\w.\-]{{1,256}})\"{_SPACE}:{_SPACE}(?=\{{)"
_BRACE = rf"(?:{_SPACE}\}})?"

APERTUS = ModelFormat(
    name="apertus",
    marks=(_OPENER,),
    types=("apertus",),
    reasoning=unmistakable("<|inner_prefix|>", "<|inner_suffix|>"),
    notations=(
        Notation(
            name="apertus",
            openers=(_OPENER,),
            reader=partial(
                ObjectReader,
                Objects(
                    head=rf"(?:{_BRACE}{_SPACE}[\[,])?{_CALL}",
                    next_call=rf"{_BRACE}{_SPACE},(?={_CALL})",
                    block_end=rf"{_BRACE}(?:{list_end(_END)})",
                ),
            ),
            text=CallText(
                mark=_OPENER,
                before=f"{_OPENER}[",
                head='{"NAME": ',
                tail="}",
                between=", ",
                after=f"]{_END}",
            ),
        ),
    ),
)
