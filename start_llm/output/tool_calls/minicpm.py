"""MiniCPM: `<function name="NAME"><param name="KEY">VALUE</param></function>`, markup inside CDATA.

Ours: mlx_lm's parser reads a finished block only, ends values at the first `</param>` and strips them.
"""

from __future__ import annotations

from functools import partial

from start_llm.output.tool_calls.base import Format
from start_llm.output.tool_calls.tagged import TaggedReader, Tags

_TAGS = Tags(
    head=r"\s{0,64}name\s{0,64}=\s{0,64}[\"'](?P<name>[^<>\"'\n]{1,256})[\"']\s{0,64}>",
    key=r"\s{0,64}<param\s{1,64}name\s{0,64}=\s{0,64}[\"'](?P<key>[^<>\"'\n]{1,256})[\"']\s{0,64}>",
    value_end="</param>",
    end=r"\s{0,64}</function>",
    wrapper=("<![CDATA[", "]]>"),
)
MINICPM = Format("minicpm", ("<function ",), partial(TaggedReader, _TAGS))
