"""GLM-4.5 and later: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`.

Own parser: mlx_lm's parser reads only finished blocks and ends a value at the first `</arg_value>`.
"""

from dataclasses import replace
from functools import partial

import regex

from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.tagged import TaggedReader, Tags
from start_llm.formats.reasoning_marks import THINK
from start_llm.formats.writing.arguments import TaggedArguments
from start_llm.formats.writing.call_text import CallText


def tags_of_keys_and_values(prefix: str = "", suffix: str = "") -> Tags:
    """Return the patterns of a call with a name, then alternating keys and values.

    Args:
        prefix, suffix: of all tag names.
    """
    value_end = f"</{prefix}arg_value{suffix}>"
    key, value, call = (
        regex.escape(f"{prefix}{tag}{suffix}>") for tag in ("arg_key", "arg_value", "tool_call")
    )
    end = f"</{call}"
    return Tags(
        head=rf"\s{{0,64}}(?P<name>[^\s<>{{][^\s<>]{{0,255}})(?=\s{{0,64}}(?:<{key}|{end}))",
        key=rf"\s{{0,64}}<{key}(?P<key>[^<>]{{1,256}})</{key}\s{{0,64}}<{value}",
        value_end=value_end,
        end=rf"\s{{0,64}}{end}",
        has_bare_names=True,
        another=rf"<{call}\s{{0,64}}(?P<tool>[^\s<>{{][^\s<>]{{0,255}})",
    )


GLM = ModelFormat(
    name="glm4",
    marks=("<arg_key>", "<|observation|>"),
    types=("glm4", "chatglm"),
    reasoning=replace(THINK, cut="</think>"),
    orphan_close=True,
    notations=(
        Notation(
            name="glm",
            openers=("<tool_call>",),
            reader=partial(TaggedReader, tags_of_keys_and_values()),
            text=CallText(
                mark="<arg_key>",
                head="<tool_call>NAME\n",
                tail="</tool_call>",
                arguments=TaggedArguments(
                    key="<arg_key>KEY</arg_key>\n<arg_value>", value_end="</arg_value>", after="\n"
                ),
                between="\n",
            ),
        ),
    ),
)
