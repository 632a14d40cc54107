"""Mistral: `[TOOL_CALLS][{"name": NAME, "arguments": {…}}]`, and newer `[TOOL_CALLS]NAME[ARGS]{…}`.

Ours: mlx_lm's parser loses every call of a block if one is malformed, and takes tools that were not offered.
"""

from __future__ import annotations

from functools import partial

from start_llm.output.tool_calls.base import Format
from start_llm.output.tool_calls.json_calls import ObjectReader, Objects

_OPENER = "[TOOL_CALLS]"
_LIST = Objects(
    head=r"(?:\s{0,64}[\[,])?\s{0,64}(?=\{)",
    next_call=r"\s{0,64},\s{0,64}(?=\{)",
    block_end=r"\s{0,64}\]",
)
_HEADED = Objects(head=r"\s{0,64}(?P<name>[\w.\-]{1,256})(?:\[CALL_ID\][^\[\]]{0,64})?\[ARGS\]\s{0,64}(?=\{)")
MISTRAL_LIST = Format("mistral_list", (_OPENER,), partial(ObjectReader, _LIST))
MISTRAL_HEADED = Format("mistral_headed", (_OPENER,), partial(ObjectReader, _HEADED))
