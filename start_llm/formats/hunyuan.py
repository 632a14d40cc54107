"""Hunyuan: `<tool_calls>[{"name": NAME, "arguments": {…}}]</tool_calls>`, and `<answer>` around an answer.

Hy3 puts GLM's tags between the same marks: `<tool_call>NAME<tool_sep><arg_key>KEY</arg_key><arg_value>…`.
Own parser, because mlx_lm has none.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from start_llm.formats.glm import tags_of_keys_and_values
from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.json_calls import ObjectReader
from start_llm.formats.reading.lists import json_list
from start_llm.formats.reading.tagged import TaggedReader
from start_llm.formats.reasoning_marks import THINK
from start_llm.formats.writing.arguments import TaggedArguments
from start_llm.formats.writing.call_text import CallText

_OPENER, _END = "<tool_calls>", "</tool_calls>"
_NAME = r"(?P<name>[^\s<>{][^\s<>]{0,255})"
_TAGS = replace(
    tags_of_keys_and_values(),
    head=rf"\s{{0,64}}<tool_call>\s{{0,64}}{_NAME}\s{{0,64}}<tool_sep>",
    has_bare_names=False,
    another=rf"(?:{_OPENER}\s{{0,64}})?<tool_call>\s{{0,64}}(?P<tool>[^\s<>{{][^\s<>]{{0,255}})\s{{0,64}}<tool_sep>",
    next_call=r"\s{0,64}(?=<tool_call>)",
    block_end=rf"\s{{0,64}}{_END}",
)

HUNYUAN = ModelFormat(
    name="hunyuan",
    marks=("<｜hy_Assistant｜>", "<|extra_4|>", "<tool_sep>"),
    types=("hunyuan", "hy_v3"),
    reasoning=replace(THINK, cut="\n</think>\n"),
    around_answer=(("<answer>\n", "\n</answer>"), ("<answer>", "</answer>")),
    notations=(
        Notation(
            name="hy3",
            openers=(_OPENER,),
            reader=partial(TaggedReader, _TAGS),
            text=CallText(
                mark="<tool_sep>",
                before=f"{_OPENER}\n",
                head="<tool_call>NAME<tool_sep>\n",
                tail="</tool_call>\n",
                arguments=TaggedArguments(
                    key="<arg_key>KEY</arg_key>\n<arg_value>", value_end="</arg_value>", after="\n"
                ),
                after=_END,
            ),
        ),
        Notation(
            name="hunyuan",
            openers=(_OPENER,),
            reader=partial(ObjectReader, json_list(_END)),
            text=CallText(
                mark=_OPENER,
                before=f"{_OPENER}[",
                head='{"name": "NAME", "arguments": ',
                tail="}",
                between=", ",
                after=f"]{_END}",
            ),
        ),
    ),
)
