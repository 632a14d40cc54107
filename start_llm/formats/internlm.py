"""InternLM 2 and later: `<|action_start|><|plugin|>{"name": NAME, "parameters": {…}}<|action_end|>`.

Own parser, because mlx_lm has none.
"""

from __future__ import annotations

from functools import partial

from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.json_calls import ObjectReader, Objects
from start_llm.formats.reasoning_marks import THINK
from start_llm.formats.writing.call_text import CallText

_OPENER, _END = "<|action_start|>", "<|action_end|>"
_PLUGIN = "<|plugin|>"

INTERNLM = ModelFormat(
    name="internlm",
    marks=(_OPENER,),
    types=("internlm",),
    reasoning=THINK,
    notations=(
        Notation(
            name="internlm",
            openers=(_OPENER,),
            reader=partial(
                ObjectReader,
                Objects(head=r"\s{0,64}<\|plugin\|>\s{0,64}(?=\{)", block_end=r"\s{0,64}<\|action_end\|>"),
            ),
            text=CallText(
                mark=_PLUGIN,
                head=f'{_OPENER}{_PLUGIN}{{"name": "NAME", "parameters": ',
                tail=f"}}{_END}",
                between="\n",
            ),
        ),
    ),
)
