"""Seed-OSS: `<seed:tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></seed:tool_call>`.

Own parser, because mlx_lm has none. Models write a value directly after its tag or on lines of its own. We
write it on lines of its own, so that a text may begin with a newline.
"""

from dataclasses import replace
from functools import partial

from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.qwen import TAGS
from start_llm.formats.reading.tagged import TaggedReader
from start_llm.formats.reasoning_marks import unmistakable
from start_llm.formats.writing.arguments import TaggedArguments
from start_llm.formats.writing.call_text import CallText

_REASONING = unmistakable("<seed:think>", "</seed:think>")
_OPENER = "<seed:tool_call>"
_END = "</seed:tool_call>"
_TAGS = replace(
    TAGS,
    end=rf"\s{{0,64}}(?:</function>|{_END})",
    another=rf"(?:{_OPENER}\s{{0,64}})?<function=(?P<tool>[^<>\n]{{1,256}})>",
    block_end=rf"\s{{0,64}}{_END}",
    padding="detected",
)

SEED = ModelFormat(
    name="seed_oss",
    marks=(_OPENER, _REASONING.opening),
    types=("seed_oss",),
    reasoning=_REASONING,
    notations=(
        Notation(
            name="seed",
            openers=(_OPENER,),
            reader=partial(TaggedReader, _TAGS),
            text=CallText(
                mark=_OPENER,
                head=f"{_OPENER}\n<function=NAME>\n",
                tail=f"</function>\n{_END}",
                arguments=TaggedArguments(
                    key="<parameter=KEY>", padding="\n", value_end="</parameter>", after="\n"
                ),
                between="\n",
            ),
        ),
    ),
)
