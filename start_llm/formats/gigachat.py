"""GigaChat 3: a separate message, `function call<|role_sep|>` and `{"name": NAME, "arguments": {…}}`.

Newer models write `<|function_call|>` before the object. Own parser, because mlx_lm has none.
"""

from __future__ import annotations

from functools import partial

from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.json_calls import ObjectReader
from start_llm.formats.reading.lists import json_list
from start_llm.formats.writing.call_text import CallText

_ROLE = "function call<|role_sep|>"

GIGACHAT = ModelFormat(
    name="gigachat",
    marks=(_ROLE, "<|function_call|>"),
    types=("gigachat",),
    notations=(
        Notation(
            name="gigachat_role",
            openers=(_ROLE, f"<|message_sep|>\n\n{_ROLE}"),
            reader=partial(ObjectReader, json_list()),
            text=CallText(
                mark=_ROLE,
                before=f"{_ROLE}\n",
                head='{"name": "NAME", "arguments": ',
                tail="}",
                between="\n",
            ),
        ),
        Notation(
            name="gigachat",
            openers=("<|function_call|>",),
            reader=partial(ObjectReader, json_list()),
            text=CallText(
                mark="<|function_call|>",
                head='<|function_call|>{"name": "NAME", "arguments": ',
                tail="}",
            ),
        ),
    ),
)
