"""Command R7B, Command A, Cohere 2 MoE: a JSON list of actions, an answer between marks.

    <|START_ACTION|>[
        {"tool_call_id": "0", "tool_name": NAME, "parameters": {…}}
    ]<|END_ACTION|>

Own parser, because mlx_lm has none.
"""

from __future__ import annotations

from functools import partial

from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.json_calls import ObjectReader
from start_llm.formats.reading.lists import json_list
from start_llm.formats.reasoning_marks import unmistakable
from start_llm.formats.writing.call_text import CallText

_REASONING = unmistakable("<|START_THINKING|>", "<|END_THINKING|>")
_AROUND_ANSWER = (("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>"))

COHERE = ModelFormat(
    name="cohere",
    marks=("<|START_ACTION|>",),
    types=("cohere",),
    reasoning=_REASONING,
    answer_marks=tuple(mark for pair in _AROUND_ANSWER for mark in pair),
    around_answer=_AROUND_ANSWER,
    notations=(
        Notation(
            name="cohere",
            openers=("<|START_ACTION|>",),
            reader=partial(ObjectReader, json_list("<|END_ACTION|>")),
            text=CallText(
                mark="<|START_ACTION|>",
                before="<|START_ACTION|>[\n    ",
                head='{"tool_call_id": "NUMBER", "tool_name": "NAME", "parameters": ',
                tail="}",
                between=",\n    ",
                after="\n]<|END_ACTION|>",
            ),
        ),
    ),
)
