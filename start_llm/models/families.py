"""Which form the text of a model has. A new family is a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from start_llm.core.chat import Json
from start_llm.core.family import Family, ThoughtMarks

_TAGS = ThoughtMarks("<think>", "</think>", cut="\n</think>\n\n")


@dataclass(frozen=True, slots=True)
class _Row:
    """A family and how it is told.

    Attributes:
        marks: texts of which one must stand in the chat template or be an added token.
        types: beginnings of `model_type` in config.json, for files that say too little.
    """

    family: Family
    marks: tuple[str, ...]
    types: tuple[str, ...]


# The first row that fits counts: marks of the stronger evidence stand first.
_ROWS = (
    _Row(
        Family(
            name="gpt_oss",
            channels=True,
            thought=ThoughtMarks(
                "<|channel|>analysis<|message|>",
                "<|end|>",
                cut="<|end|><|start|>assistant<|channel|>final<|message|>",
            ),
        ),
        ("<|channel|>",),
        ("gpt_oss",),
    ),
    _Row(
        Family(
            name="gemma4",
            thought=ThoughtMarks("<|channel>thought", "<channel|>", cut="\n<channel|>"),
            formats=("gemma4",),
        ),
        ("<|channel>", "<|tool_call>"),
        ("gemma4",),
    ),
    _Row(
        Family(name="kimi", thought=_TAGS, formats=("kimi",), call_ids="kimi"),
        ("<|tool_calls_section_begin|>",),
        ("kimi",),
    ),
    _Row(
        Family(name="glm4", thought=replace(_TAGS, cut="</think>"), orphan_close=True, formats=("glm",)),
        ("<arg_key>", "<|observation|>"),
        ("glm4", "chatglm"),
    ),
    _Row(
        Family(name="minicpm", thought=_TAGS, formats=("minicpm",)),
        ('<function name="',),
        ("minicpm",),
    ),
    _Row(
        Family(
            name="mistral",
            thought=ThoughtMarks("[THINK]", "[/THINK]", cut="[/THINK]"),
            formats=("mistral_headed", "mistral_list"),
            call_ids="nine",
        ),
        ("[TOOL_CALLS]",),
        ("mistral", "ministral"),
    ),
    _Row(
        Family(name="qwen3", thought=_TAGS, formats=("qwen_xml", "hermes")),
        ("<tool_call>",),
        ("qwen",),
    ),
    _Row(
        Family(name="llama3", formats=("llama_bare", "llama_tagged")),
        ("<|python_tag|>", "<|start_header_id|>"),
        ("llama",),
    ),
)
_GENERIC = Family(name="generic", thought=_TAGS)
_BY_NAME: Mapping[str, Family] = {row.family.name: row.family for row in _ROWS} | {"generic": _GENERIC}


def named(name: str) -> Family:
    """The family that `MODEL_FAMILY` names. KeyError for a name that is not in `core.family.FAMILY_NAMES`."""
    return _BY_NAME[name]


def detect(config: Mapping[str, Json], template: str, added_tokens: Sequence[str]) -> Family:
    """The family of a model, from what its files say.

    The template counts more than the vocabulary, and that more than the architecture's name: a fine-tune may
    change the template, and keeps the others.
    """
    known = frozenset(added_tokens)
    return _with_real_thoughts(_likeliest(config, template, known), template, known)


def _likeliest(config: Mapping[str, Json], template: str, added_tokens: frozenset[str]) -> Family:
    """By the strongest evidence that there is; the vocabulary of a fine-tune has the marks of its origin."""
    model_type = str(config.get("model_type", ""))
    evidence: tuple[Callable[[_Row], bool], ...] = (
        lambda row: any(mark in template for mark in row.marks),
        lambda row: not added_tokens.isdisjoint(row.marks),
        lambda row: model_type.startswith(row.types),
    )
    for fits in evidence:
        for row in _ROWS:
            if fits(row):
                return row.family
    return _GENERIC


def _with_real_thoughts(family: Family, template: str, added_tokens: frozenset[str]) -> Family:
    """A model that knows no mark of thoughts writes none, so an answer that quotes one is an answer."""
    candidates = [marks for marks in (family.thought, _TAGS) if marks]
    shown = [marks for marks in candidates if marks.closing in template]
    known = [marks for marks in candidates if marks.closing in added_tokens]
    for marks in (*shown, *known):
        return replace(family, thought=marks)
    return replace(family, thought=None, orphan_close=False)
