"""Formats whose calls are objects, `{"name": NAME, "arguments": {…}}`, most in a list between two marks.

Own parsers, because mlx_lm has none.
"""

from dataclasses import replace
from functools import partial

from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.json_calls import ObjectReader, Objects
from start_llm.formats.reading.lists import json_list
from start_llm.formats.reasoning_marks import THINK, unmistakable
from start_llm.formats.writing.call_text import CallText

_HEAD = '{"name": "NAME", "arguments": '


def list_text(opener: str, end: str = "", *, mark: str | None = None) -> CallText:
    """Return how a list is written behind an opener.

    Args:
        mark: what shows in a chat template that the list is meant; None: the opener.
    """
    return CallText(
        mark=opener if mark is None else mark,
        before=f"{opener}[",
        head=_HEAD,
        tail="}",
        between=", ",
        after=f"]{end}",
    )


def listed(name: str, opener: str, end: str = "", *, mark: str | None = None) -> Notation:
    """Return the notation of a list between two marks, of which models may forget the second one."""
    return Notation(
        name=name,
        openers=(opener,),
        reader=partial(ObjectReader, json_list(end)),
        text=list_text(opener, end, mark=mark),
    )


NEMOTRON = ModelFormat(
    name="nemotron_h",
    marks=("<TOOLCALL>",),
    types=("nemotron_h",),
    reasoning=THINK,
    notations=(listed("toolcall", "<TOOLCALL>", "</TOOLCALL>"),),
)
"""Nemotron Nano 2: `<TOOLCALL>[{"name": NAME, "arguments": {…}}]</TOOLCALL>`."""

_BEGIN_ANSWER, _END_ANSWER = "[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"
APRIEL = ModelFormat(
    name="apriel",
    marks=(_BEGIN_ANSWER,),
    types=("apriel",),
    reasoning=unmistakable("Here are my reasoning steps:", _BEGIN_ANSWER, cut=f"\n{_BEGIN_ANSWER}\n"),
    answer_marks=(_END_ANSWER,),
    notations=(listed("apriel", "<tool_calls>", "</tool_calls>", mark=_BEGIN_ANSWER),),
)
"""Apriel: `<tool_calls>[{"name": NAME, "arguments": {…}}]</tool_calls>`, and sentences around its reasoning.

    Here are my reasoning steps:
    …
    [BEGIN FINAL RESPONSE]
    …
    [END FINAL RESPONSE]
"""

_GRANITE, _PHI4_END = "<|tool_call|>", "<|/tool_call|>"
GRANITE = ModelFormat(
    name="granite",
    marks=(_GRANITE,),
    types=("granite",),
    around_answer=(("<response>", "</response>"),),
    notations=(replace(listed("granite", _GRANITE, _PHI4_END), text=list_text(_GRANITE)),),
)
"""Granite 3: `<|tool_call|>[{"name": NAME, "arguments": {…}}]`.

Granite 3.3 puts `<response>` around an answer after its reasoning.
"""
_FUNCTOOLS = replace(json_list(), head=r"(?:functools)?(?:\s{0,64}[\[,])?\s{0,64}(?=\{)")
PHI4 = ModelFormat(
    name="phi4",
    marks=(_PHI4_END, "functools["),
    types=("phi4",),
    notations=(
        listed("phi4", _GRANITE, _PHI4_END, mark=_PHI4_END),
        Notation(
            name="functools",
            openers=("functools[",),
            reader=partial(ObjectReader, _FUNCTOOLS),
            text=list_text("functools", mark="functools["),
        ),
    ),
)
"""Phi 4 mini ends Granite's list with `<|/tool_call|>`, and often writes `functools[{…}]`."""

# Without an opener, the first member tells a call from a JSON answer, which must stream without delay.
_BARE = replace(
    json_list(),
    head=r"\s{0,64}[\[,]\s{0,64}(?=\{\s{0,64}\"(?:name|parameters|arguments)\")",
    may_lack_arguments=False,
)
XLAM = ModelFormat(
    name="xlam",
    types=("xlam",),
    notations=(
        Notation(
            name="xlam",
            openers=(),
            bare=("[",),
            reader=partial(ObjectReader, _BARE),
            text=list_text(""),
        ),
    ),
)
"""xLAM: a bare `[{"name": NAME, "arguments": {…}}]`."""

_ACTION, _ACTION_END = "<|START_ACTION|>", "<|END_ACTION|>"
_AROUND_ANSWER = (("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>"))
COHERE = ModelFormat(
    name="cohere",
    marks=(_ACTION,),
    types=("cohere",),
    reasoning=unmistakable("<|START_THINKING|>", "<|END_THINKING|>"),
    answer_marks=tuple(mark for pair in _AROUND_ANSWER for mark in pair),
    around_answer=_AROUND_ANSWER,
    notations=(
        Notation(
            name="cohere",
            openers=(_ACTION,),
            reader=partial(ObjectReader, json_list(_ACTION_END)),
            text=CallText(
                mark=_ACTION,
                before=f"{_ACTION}[\n    ",
                head='{"tool_call_id": "NUMBER", "tool_name": "NAME", "parameters": ',
                tail="}",
                between=",\n    ",
                after=f"\n]{_ACTION_END}",
            ),
        ),
    ),
)
"""Command R7B, Command A, Cohere 2 MoE: a JSON list of actions, an answer between marks.

    <|START_ACTION|>[
        {"tool_call_id": "0", "tool_name": NAME, "parameters": {…}}
    ]<|END_ACTION|>
"""

# --------------------------------------------------------------------------------------- objects side by side

MINIMAX_M1 = ModelFormat(
    name="minimax_m1",
    marks=("<tool_calls>",),
    types=("minimax_m1",),
    reasoning=THINK,
    notations=(
        Notation(
            name="minimax_m1",
            openers=("<tool_calls>",),
            reader=partial(ObjectReader, json_list("</tool_calls>")),
            text=CallText(
                mark="<tool_calls>",
                before="<tool_calls>\n",
                head=_HEAD,
                tail="}",
                between="\n",
                after="\n</tool_calls>",
            ),
        ),
    ),
)
"""MiniMax-M1: `{"name": NAME, "arguments": {…}}`, one per line between `<tool_calls>` and `</tool_calls>`."""

_ROLE, _FUNCTION_CALL = "function call<|role_sep|>", "<|function_call|>"
GIGACHAT = ModelFormat(
    name="gigachat",
    marks=(_ROLE, _FUNCTION_CALL),
    types=("gigachat",),
    notations=(
        Notation(
            name="gigachat_role",
            openers=(_ROLE, f"<|message_sep|>\n\n{_ROLE}"),
            reader=partial(ObjectReader, json_list()),
            text=CallText(mark=_ROLE, before=f"{_ROLE}\n", head=_HEAD, tail="}", between="\n"),
        ),
        Notation(
            name="gigachat",
            openers=(_FUNCTION_CALL,),
            reader=partial(ObjectReader, json_list()),
            text=CallText(mark=_FUNCTION_CALL, head=_FUNCTION_CALL + _HEAD, tail="}"),
        ),
    ),
)
"""GigaChat 3: a separate message, `function call<|role_sep|>` and `{"name": NAME, "arguments": {…}}`.

Newer models write `<|function_call|>` before the object.
"""

_ACTION_START, _ACTION_STOP, _PLUGIN = "<|action_start|>", "<|action_end|>", "<|plugin|>"
INTERNLM = ModelFormat(
    name="internlm",
    marks=(_ACTION_START,),
    types=("internlm",),
    reasoning=THINK,
    notations=(
        Notation(
            name="internlm",
            openers=(_ACTION_START,),
            reader=partial(
                ObjectReader,
                Objects(head=r"\s{0,64}<\|plugin\|>\s{0,64}(?=\{)", block_end=r"\s{0,64}<\|action_end\|>"),
            ),
            text=CallText(
                mark=_PLUGIN,
                head=f'{_ACTION_START}{_PLUGIN}{{"name": "NAME", "parameters": ',
                tail=f"}}{_ACTION_STOP}",
                between="\n",
            ),
        ),
    ),
)
"""InternLM 2 and later: `<|action_start|><|plugin|>{"name": NAME, "parameters": {…}}<|action_end|>`."""
