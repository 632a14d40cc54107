"""Hunyuan: `<tool_calls>[{"name": NAME, "arguments": {…}}]</tool_calls>`, and `<answer>` around an answer.

Hy3 puts GLM's tags between the same marks: `<tool_call>NAME<tool_sep><arg_key>KEY</arg_key><arg_value>…`.
Most checkpoints of Hy3 and Hy4 have `:opensource` behind the name of every tag.

Own parser, because mlx_lm has none.
"""

from dataclasses import replace
from functools import partial

from start_llm.formats.glm import tags_of_keys_and_values
from start_llm.formats.json_lists import listed
from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.tagged import TaggedReader, Tags
from start_llm.formats.reasoning_marks import THINK, unmistakable
from start_llm.formats.writing.arguments import TaggedArguments
from start_llm.formats.writing.call_text import CallText

_REASONING_WITH_SUFFIX = unmistakable("<think:opensource>", "</think:opensource>")
_SUFFIX = ":opensource"
_NAME = r"[^\s<>{][^\s<>]{0,255}"
_AROUND_ANSWER = (("<answer>\n", "\n</answer>"), ("<answer>", "</answer>"))


def _tags(suffix: str) -> Tags:
    """Return GLM's patterns between Hunyuan's marks. Version 4 writes no mark behind the name."""
    call, keys = rf"<tool_call{suffix}>\s{{0,64}}", tags_of_keys_and_values(suffix=suffix)
    after_name = rf"\s{{0,64}}(?:<tool_sep{suffix}>|(?={keys.key}|{keys.end}))"
    return replace(
        keys,
        head=rf"\s{{0,64}}{call}(?P<name>{_NAME}){_unnamed(after_name)}",
        has_bare_names=False,
        another=rf"(?:<tool_calls{suffix}>\s{{0,64}})?{call}(?P<tool>{_NAME}){_unnamed(after_name)}",
        next_call=rf"\s{{0,64}}(?={call})",
        block_end=rf"\s{{0,64}}</tool_calls{suffix}>",
    )


def _unnamed(pattern: str) -> str:
    return pattern.replace("(?P<key>", "(?:")


def _tagged(name: str, suffix: str, *, separator: bool = True) -> Notation:
    opener, after_name = f"<tool_calls{suffix}>", f"<tool_sep{suffix}>" if separator else ""
    return Notation(
        name=name,
        openers=(opener,),
        reader=partial(TaggedReader, _tags(suffix)),
        text=CallText(
            mark=after_name or f"<arg_key{suffix}>",
            before=f"{opener}\n",
            head=f"<tool_call{suffix}>NAME{after_name}\n",
            tail=f"</tool_call{suffix}>\n",
            arguments=TaggedArguments(
                key=f"<arg_key{suffix}>KEY</arg_key{suffix}>\n<arg_value{suffix}>",
                value_end=f"</arg_value{suffix}>",
                after="\n",
            ),
            after=f"</tool_calls{suffix}>",
        ),
    )


HUNYUAN = ModelFormat(
    name="hunyuan",
    marks=("<｜hy_Assistant｜>", "<|extra_4|>", "<tool_sep>"),
    types=("hunyuan", "hy_v3"),
    reasoning=replace(THINK, cut="\n</think>\n"),
    around_answer=_AROUND_ANSWER,
    notations=(
        _tagged("hy3", ""),
        listed("hunyuan", "<tool_calls>", "</tool_calls>"),
    ),
)
HUNYUAN_WITH_SUFFIX = ModelFormat(
    name="hy_v4",
    marks=(f"<tool_call{_SUFFIX}>", f"<tool_sep{_SUFFIX}>", f"<arg_key{_SUFFIX}>"),
    types=("hy_v4",),
    reasoning=_REASONING_WITH_SUFFIX,
    around_answer=_AROUND_ANSWER,
    notations=(_tagged("hy3_opensource", _SUFFIX), _tagged("hy4_opensource", _SUFFIX, separator=False)),
)
