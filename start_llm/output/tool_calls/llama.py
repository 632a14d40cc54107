"""Llama 3: a bare `{"name": NAME, "parameters": {…}}`, several with `;`, and `<function=NAME>{…}</function>`.

Ours: mlx_lm has no parser for them.
"""

from __future__ import annotations

from functools import partial

from start_llm.output.tool_calls.base import Format
from start_llm.output.tool_calls.json_calls import ObjectReader, Objects

# Without an opener the first member tells a call from an answer in JSON, which must not wait for its end.
_BARE = Objects(
    head=r"(?:\s{0,64}[;,])?\s{0,64}"
    r"(?=\{\s{0,64}\"(?:(?:name|parameters|arguments)\"|type\"\s{0,64}:\s{0,64}\"function\"))",
    next_call=r"(?:\s{0,64}[;,])?\s{0,64}(?=\{)",
    may_lack_arguments=False,
)
_TAGGED = Objects(
    head=r"(?P<name>[^<>{}\n]{1,256})>\s{0,64}(?=\{)",
    block_end=r"\s{0,64}</function>",
)
LLAMA_BARE = Format("llama_bare", ("<|python_tag|>",), partial(ObjectReader, _BARE), bare=True)
LLAMA_TAGGED = Format("llama_tagged", ("<function=",), partial(ObjectReader, _TAGGED))
