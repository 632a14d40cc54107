"""Qwen3, Hermes: `<tool_call>{"name": NAME, "arguments": {…}}</tool_call>`.

Ours: mlx_lm's parser needs the closing tag, loses a good call before a bad one, and takes tools that were not
offered.
"""

from __future__ import annotations

from functools import partial

from start_llm.output.tool_calls.base import Format
from start_llm.output.tool_calls.json_calls import ObjectReader, Objects

_OBJECTS = Objects(
    head=r"\s{0,64}(?=\{)",
    next_call=r"\s{0,64}(?=\{)",
    block_end=r"\s{0,64}</tool_call>",
)
HERMES = Format("hermes", ("<tool_call>",), partial(ObjectReader, _OBJECTS))
