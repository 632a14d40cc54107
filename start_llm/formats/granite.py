"""Granite 3: `<|tool_call|>[{"name": NAME, "arguments": {…}}]`. Phi 4 mini ends it with `<|/tool_call|>`.

Granite 3.3 puts `<response>` around an answer after its reasoning. Phi 4 mini often writes `functools[{…}]`.

Own parser, because mlx_lm has none.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.json_calls import ObjectReader
from start_llm.formats.reading.lists import json_list
from start_llm.formats.writing.call_text import CallText

_OPENER, _END = "<|tool_call|>", "<|/tool_call|>"
_TEXT = CallText(
    mark=_OPENER,
    before=f"{_OPENER}[",
    head='{"name": "NAME", "arguments": ',
    tail="}",
    between=", ",
    after="]",
)
_NOTATION = Notation(
    name="granite",
    openers=(_OPENER,),
    reader=partial(ObjectReader, json_list(_END)),
    text=_TEXT,
)
_FUNCTOOLS = replace(json_list(), head=r"(?:functools)?(?:\s{0,64}[\[,])?\s{0,64}(?=\{)")

GRANITE = ModelFormat(
    name="granite",
    marks=(_OPENER,),
    types=("granite",),
    around_answer=(("<response>", "</response>"),),
    notations=(_NOTATION,),
)
PHI4 = ModelFormat(
    name="phi4",
    marks=(_END, "functools["),
    types=("phi4",),
    notations=(
        Notation(
            name="phi4",
            openers=(_OPENER,),
            reader=partial(ObjectReader, json_list(_END)),
            text=replace(_TEXT, mark=_END, after=f"]{_END}"),
        ),
        Notation(
            name="functools",
            openers=("functools[",),
            reader=partial(ObjectReader, _FUNCTOOLS),
            text=replace(_TEXT, mark="functools[", before="functools["),
        ),
    ),
)
