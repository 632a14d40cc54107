"""Qwen, in JSON (Qwen3, Hermes) or in tags (Qwen3-Coder, Qwen3.5).

    <tool_call>{"name": NAME, "arguments": {…}}</tool_call>
    <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>

Own parser: mlx_lm's parser reads only finished blocks, ends a value at the first `</parameter>`, and
converts the text "null" to None. The first tag may be missing: Qwen3-Coder drops it in up to half of the
turns that contain text before the call (measured in ollama/ollama#17742). Granite 3.1 and xLAM put a JSON
list into the tag; Qwen2.5-Coder often repeats the tag of its prompt's tools, `<tools>`. Models of Hermes'
family also write `<function_call>`, `<function_calls>`, and `<function name="NAME">` around an object.
"""

from dataclasses import replace
from functools import partial

from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.json_calls import ObjectReader, Objects
from start_llm.formats.reading.lists import json_list
from start_llm.formats.reading.tagged import TaggedReader, Tags
from start_llm.formats.reasoning_marks import THINK
from start_llm.formats.writing.arguments import TaggedArguments
from start_llm.formats.writing.call_text import CallText

_NAME = r"(?P<name>[^<>\n]{1,256})>"


def _tag(tag: str, group: str) -> str:
    """Match `<tag=NAME>`, and `<tag name="NAME">`, which models write by mistake."""
    attribute = rf"\s{{1,8}}name\s{{0,8}}=\s{{0,8}}[\"'](?P<{group}>[^<>\"'\n]{{1,256}})[\"']\s{{0,8}}>"
    return rf"<{tag}(?:=(?P<{group}>[^<>\n]{{1,256}})>|{attribute})"


TAGS = Tags(
    head=r"\s{0,64}" + _tag("function", "name"),
    key=r"\s{0,64}" + _tag("parameter", "key"),
    value_end="</parameter>",
    end=r"\s{0,64}(?:</function>|</tool_call>)",
    next_call=r"\s{0,64}(?=<function[=\s])",
    block_end=r"\s{0,64}</tool_call>",
    another=r"(?:<tool_call>\s{0,64})?" + _tag("function", "tool"),
    padding="always",
)
_BARE = replace(TAGS, head=r"(?:\s{0,64}<function=)?" + _NAME)

QWEN = ModelFormat(
    name="qwen3",
    marks=("<tool_call>",),
    types=("qwen",),
    reasoning=THINK,
    notations=(
        Notation(
            name="qwen_xml",
            openers=("<tool_call>",),
            reader=partial(TaggedReader, TAGS),
            text=CallText(
                mark="<function=",
                head="<tool_call>\n<function=NAME>\n",
                tail="</function>\n</tool_call>",
                arguments=TaggedArguments(
                    key="<parameter=KEY>", padding="\n", value_end="</parameter>", after="\n"
                ),
                between="\n",
            ),
        ),
        Notation(
            name="hermes",
            openers=("<tool_call>",),
            reader=partial(ObjectReader, json_list("</tool_call>")),
            text=CallText(
                mark="<tool_call>",
                head='<tool_call>\n{"name": "NAME", "arguments": ',
                tail="}\n</tool_call>",
                between="\n",
            ),
        ),
    ),
)
_ATTRIBUTE = r"\s{0,8}name\s{0,8}=\s{0,8}[\"'](?P<name>[^<>\"'\n]{1,256})[\"']\s{0,8}>"
_NAMED = replace(TAGS, head=_ATTRIBUTE)
_IN_PARAMS = replace(
    TAGS,
    key=r"\s{0,64}<param\s{1,8}name\s{0,8}=\s{0,8}[\"'](?P<key>[^<>\"'\n]{1,256})[\"']\s{0,8}>",
    value_end="</param>",
    padding="detected",
    wrapper=("<![CDATA[", "]]>"),
)
_NAMED_OBJECT = Objects(head=rf"{_ATTRIBUTE}\s{{0,64}}(?=\{{)", block_end=r"\s{0,64}</function>")
_OBJECT = Objects(
    head=r"\s{0,64}" + _tag("function", "name") + r"\s{0,64}(?=\{)",
    block_end=r"\s{0,64}</function>(?:\s{0,64}</tool_call>)?",
)
_IN_OTHER_TAGS = ("tools", "function_call", "function_calls")
QWEN_READ_ONLY = (
    Notation(name="qwen_bare", openers=("<function=",), reader=partial(TaggedReader, _BARE)),
    Notation(name="qwen_params", openers=("<tool_call>",), reader=partial(TaggedReader, _IN_PARAMS)),
    Notation(name="qwen_named", openers=("<function ",), reader=partial(TaggedReader, _NAMED)),
    Notation(name="hermes_named", openers=("<function ",), reader=partial(ObjectReader, _NAMED_OBJECT)),
    Notation(name="hermes_function", openers=("<tool_call>",), reader=partial(ObjectReader, _OBJECT)),
    *(
        Notation(
            name=f"hermes_{tag}", openers=(f"<{tag}>",), reader=partial(ObjectReader, json_list(f"</{tag}>"))
        )
        for tag in _IN_OTHER_TAGS
    ),
)

ERNIE = ModelFormat(
    name="ernie",
    marks=("<response>\n", r"<response>\n"),
    types=("ernie",),
    reasoning=THINK,
    around_answer=(("<response>\n", "\n</response>"), ("<response>", "</response>")),
    notations=tuple(notation for notation in QWEN.notations if notation.name == "hermes"),
)
"""ERNIE 4.5: calls as in Hermes, and `<response>` around the answer of a thinking model."""
