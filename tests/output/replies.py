"""Replies for properties: pieces of any size, noise made of markup, and calls whose words can be followed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from hypothesis import strategies as st

from start_llm.core.family import Family
from start_llm.formats.registry import family_by_name
from tests.output.corpus.case import TAGS, Call, Case
from tests.output.corpus.writers import HARMONY, WRITERS, Writer

FAMILIES: Mapping[str, Family] = {
    "qwen3": WRITERS["qwen_xml"].family,
    "glm4": replace(WRITERS["glm"].family, orphan_close=True),
    "gemma4": Family(name="gemma4", reasoning=family_by_name("gemma4").reasoning, formats=("gemma4",)),
    "mistral": Family(
        name="mistral",
        reasoning=family_by_name("mistral").reasoning,
        formats=("mistral_headed", "mistral_list"),
    ),
    "llama3": Family(name="llama3", formats=("llama_bare", "llama_tagged")),
    "kimi": family_by_name("kimi"),
    "cohere": family_by_name("cohere"),
    "minicpm": WRITERS["minicpm"].family,
    **{name: WRITERS[name].family for name in ("lfm2", "pythonic", "olmo3", "toolcall")},
    "minimax": WRITERS["minimax"].family,
    "deepseek_v32": WRITERS["dsml_functions"].family,
    "deepseek": WRITERS["deepseek"].family,
    "kimi_k3": family_by_name("kimi_k3"),
    "seed_oss": family_by_name("seed_oss"),
    "hunyuan": family_by_name("hunyuan"),
    "apriel": family_by_name("apriel"),
    "apertus": family_by_name("apertus"),
    "step3": WRITERS["step3"].family,
    "generic": Family(name="generic", reasoning=TAGS),
    "gpt_oss": HARMONY,
}

_MARKS = (
    "<think>", "</think>", "<|channel>thought", "<channel|>", "[THINK]", "[/THINK]",
    "<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>",
    "<tool_call>", "</tool_call>", "<function=read>", "<function=list>", "<function=remove>", "</function>",
    "<parameter=path>", "<parameter=limit>", "</parameter>", "<arg_key>path</arg_key>", "<arg_value>",
    "</arg_value>", '<function name="read">', '<param name="path">', "</param>", "<![CDATA[", "]]>",
    "<|tool_call>", "<tool_call|>", "call:read{", '<|"|>', "path:", "[TOOL_CALLS]", "[ARGS]", "read[ARGS]",
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.read:0", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "<|tool_calls_section_end|>", "<|python_tag|>", "<|start|>", "assistant",
    "<|channel|>", "analysis", "final", "commentary", " to=functions.read", "<|constrain|>", "json",
    "<|message|>", "<|end|>", "<|call|>", "<|return|>",
    "<|tool_call_start|>", "<|tool_call_end|>", "<function_calls>", "</function_calls>", "<|python_start|>",
    "<|python_end|>", "<TOOLCALL>", "</TOOLCALL>", "<|tool_call|>", "<|/tool_call|>", "functools[",
    "<tool_calls>", "</tool_calls>", "function call<|role_sep|>", "<|function_call|>", "<|START_ACTION|>",
    "<|END_ACTION|>", "<start_function_call>", "<end_function_call>", "<escape>", "call:list{}",
    "read(path='", "[read(", "list()", "path='a')",
    "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="read">', "</invoke>",
    '<parameter name="path">', "<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>",
    "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "<｜DSML｜tool_calls>", "<｜DSML｜ calls>",
    '<｜DSML｜invoke name="read">', "</｜DSML｜invoke>", '<｜DSML｜parameter name="path" string="true">',
    "</｜DSML｜parameter>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "```json",
    "<|open|>", "<|close|>", "<|sep|>", "<|open|>tools<|sep|>", '<|open|>call tool="read" index="1"<|sep|>',
    '<|open|>argument key="path" type="string"<|sep|>', "<|close|>argument<|sep|>", "<|close|>call<|sep|>",
    '<|open|>json type="object"<|sep|>', "<|close|>json<|sep|>",
    "<answer>", "<answer>\n", "</answer>", "\n</answer>", "<tools>", "</tools>", "<tool_sep>",
    "<tool_call>read<tool_sep>", "[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]",
    "Here are my reasoning steps:", "<|tools_prefix|>", "<|tools_suffix|>", '[{"read": {"path": "a"}}]',
    "<|inner_prefix|>", "<|inner_suffix|>", "<|action_start|>", "<|plugin|>", "<|action_end|>",
    "<｜tool_calls_begin｜>", "<｜tool_call_begin｜>", "<｜tool_sep｜>", '<steptml:invoke name="read">',
    '<steptml:parameter name="path">', "</steptml:parameter>", "</steptml:invoke>", "<｜tool_call_end｜>",
    "<｜tool_calls_end｜>", "<|channel><|channel>thought", "read.call(path='a')",
)  # fmt: skip
_BITS = (
    '{"name": "read", "arguments": {"path": "a"}}', '{"name": "list", "parameters": {}}', '{"name": "',
    '"arguments": {', '{"path": "a"}', "{}", "read", "list", "remove", "{", "}", "[", "]", '"', "\\", ",",
    "'", "(", ")", "=", ":", ";", "\n", "\n\n", " ", "a", "1", "é", "🐟", "\r\n", " " * 70,
)  # fmt: skip
_CALLS = tuple(writer.call("write", text="a\nb") for writer in WRITERS.values())

halves = st.builds(
    lambda mark, length, first: mark[:length] if first else mark[length:],
    st.sampled_from(_MARKS),
    st.integers(1, 8),
    st.booleans(),
)
noise = st.lists(
    st.sampled_from(_MARKS) | st.sampled_from(_BITS) | halves | st.sampled_from(_CALLS), max_size=14
).map("".join)
"""Text that looks like calls and reasoning, and sometimes is."""


@st.composite
def pieces_of(draw: st.DrawFn, text: str) -> list[str]:
    """The text cut anywhere."""
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[i:j] for i, j in pairwise([0, *cuts, len(text)])]


@st.composite
def noisy_cases(draw: st.DrawFn, text: st.SearchStrategy[str] = noise) -> Case:
    """A reply of some family that may mean anything, or nothing."""
    return Case(
        name="noise",
        text=draw(text),
        family=FAMILIES[draw(st.sampled_from(sorted(FAMILIES)))],
        reasoning_is_open=draw(st.booleans()),
        thinking=draw(st.booleans()),
        complete=draw(st.booleans()),
    )


type Kind = Literal["call", "refused", "broken", "prose"]


@dataclass(frozen=True)
class Part:
    """A part of a reply, with a word that stands nowhere else in it."""

    kind: Kind
    word: str
    text: str


def _refused(writer: Writer, word: str) -> str:
    """A whole call that is none: its arguments are no object, or no tool is called, in a fence."""
    call = writer.write([Call("remove", {"text": word})])
    return call.replace("{", "[{").replace("}", "}]") if writer.family.channels else f"```\n{call}\n```"


def _part(writer: Writer, kind: Kind, number: int) -> Part:
    word = f"w{number}w"
    call = writer.write([Call("write", {"path": "a", "text": f"\n<{word}>\n"})])
    text = {
        "call": call,
        "refused": _refused(writer, word),
        "broken": call[: call.index(word) + len(word)],
        "prose": f"<|start|>assistant<|channel|>final<|message|>{word}<|end|>"
        if writer.family.channels
        else word,
    }[kind]
    return Part(kind, word, text)


@dataclass(frozen=True)
class Story:
    """A reply that is known part by part.

    Attributes:
        reasoning: a call, with a word of its own, that the model only thinks of.
    """

    writer: Writer
    parts: tuple[Part, ...]
    reasoning: Part | None

    @property
    def case(self) -> Case:
        reasoning = f"<think>{self.reasoning.text}</think>" if self.reasoning else ""
        space = "" if self.writer.family.channels else "\n"
        text = reasoning + space.join(part.text for part in self.parts)
        return Case(name="story", text=text, family=self.writer.family)

    def words(self, *kinds: Kind) -> list[str]:
        return [part.word for part in self.parts if part.kind in kinds]


@st.composite
def stories(draw: st.DrawFn, *kinds: Kind) -> Story:
    """Parts of these kinds in any order, all calls in one format."""
    writer = WRITERS[draw(st.sampled_from(sorted(WRITERS)))]
    chosen = draw(st.lists(st.sampled_from(kinds), max_size=5))
    parts = tuple(_part(writer, kind, number) for number, kind in enumerate(chosen))
    thinks = not writer.family.channels and draw(st.booleans())
    return Story(writer, parts, _part(writer, "call", len(parts)) if thinks else None)
