"""xLAM: a bare `[{"name": NAME, "arguments": {…}}]`.

Own parser, because mlx_lm has none.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.json_calls import ObjectReader
from start_llm.formats.reading.lists import json_list
from start_llm.formats.writing.call_text import CallText

# Without an opener, the first member tells a call from a JSON answer, which must stream without delay.
_BARE = replace(
    json_list(),
    head=r"\s{0,64}[\[,]\s{0,64}(?=\{\s{0,64}\"(?:name|parameters|arguments)\")",
    may_lack_arguments=False,
)

XLAM = ModelFormat(
    name="xlam",
    types=("xlam",),
    notations=(
        Notation(
            name="xlam",
            openers=(),
            bare=("[",),
            reader=partial(ObjectReader, _BARE),
            text=CallText(
                mark="",
                before="[",
                head='{"name": "NAME", "arguments": ',
                tail="}",
                between=", ",
                after="]",
            ),
        ),
    ),
)
