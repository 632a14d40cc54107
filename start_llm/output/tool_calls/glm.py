"""GLM-4.5 and later: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`.

Ours: mlx_lm's parser reads a finished block only and ends values at the first `</arg_value>`.
"""

from __future__ import annotations

from functools import partial

from start_llm.output.tool_calls.base import Format
from start_llm.output.tool_calls.tagged import TaggedReader, Tags

_TAGS = Tags(
    head=r"\s{0,64}(?P<name>[^\s<>{][^\s<>]{0,255})(?=\s{0,64}(?:<arg_key>|</tool_call>))",
    key=r"\s{0,64}<arg_key>(?P<key>[^<>]{1,256})</arg_key>\s{0,64}<arg_value>",
    value_end="</arg_value>",
    end=r"\s{0,64}</tool_call>",
)
GLM = Format("glm", ("<tool_call>",), partial(TaggedReader, _TAGS))
