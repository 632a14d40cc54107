"""Qwen3-Coder, Qwen3.5: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

Ours: mlx_lm's parser reads a finished block only, ends values at the first `</parameter>`, and makes None of
the text "null". The first tag may be missing: Qwen3-Coder drops it in up to half of the turns in which it
talks before it calls (measured by others: ollama/ollama#17742).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from start_llm.output.tool_calls.base import Format
from start_llm.output.tool_calls.tagged import TaggedReader, Tags

_NAME = r"(?P<name>[^<>\n]{1,256})>"
_TAGS = Tags(
    head=r"\s{0,64}<function=" + _NAME,
    key=r"\s{0,64}<parameter=(?P<key>[^<>\n]{1,256})>",
    value_end="</parameter>",
    end=r"\s{0,64}(?:</function>|</tool_call>)",
    next_call=r"\s{0,64}(?=<function=)",
    block_end=r"\s{0,64}</tool_call>",
    padded=True,
)
_BARE = replace(_TAGS, head=r"(?:\s{0,64}<function=)?" + _NAME)
QWEN_XML = Format("qwen_xml", ("<tool_call>",), partial(TaggedReader, _TAGS))
QWEN_BARE = Format("qwen_bare", ("<function=",), partial(TaggedReader, _BARE))
