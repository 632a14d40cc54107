"""The table of model formats, and what follows from it. A new format is a file, and a name here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

from start_llm.core.chat import Json
from start_llm.core.family import Family, ThoughtMarks
from start_llm.formats.cohere import COHERE
from start_llm.formats.deepseek import DEEPSEEK
from start_llm.formats.dsml import DSML
from start_llm.formats.function_gemma import FUNCTION_GEMMA
from start_llm.formats.gemma4 import GEMMA4
from start_llm.formats.gigachat import GIGACHAT
from start_llm.formats.glm import GLM
from start_llm.formats.granite import GRANITE, PHI4
from start_llm.formats.harmony import HARMONY
from start_llm.formats.kimi import KIMI
from start_llm.formats.kimi_k3 import KIMI_K3
from start_llm.formats.lfm2 import LFM2
from start_llm.formats.llama import LLAMA
from start_llm.formats.longcat import LONGCAT
from start_llm.formats.minicpm import MINICPM
from start_llm.formats.minimax import MINIMAX
from start_llm.formats.minimax_m1 import MINIMAX_M1
from start_llm.formats.minimax_m3 import MINIMAX_M3
from start_llm.formats.mistral import MISTRAL
from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.nemotron import NEMOTRON
from start_llm.formats.olmo3 import OLMO3
from start_llm.formats.pythonic import PYTHONIC
from start_llm.formats.qwen import QWEN, QWEN_BARE
from start_llm.formats.seed import SEED
from start_llm.formats.thoughts import THINK, THOUGHT_MARKS
from start_llm.formats.writing.call_text import CallText
from start_llm.formats.xlam import XLAM

GENERIC = ModelFormat(name="generic", thought=THINK)
MODEL_FORMATS: tuple[ModelFormat, ...] = (
    HARMONY,
    GEMMA4,
    MINIMAX_M3,
    MINIMAX,
    DSML,
    DEEPSEEK,
    SEED,
    KIMI_K3,
    KIMI,
    LONGCAT,
    GLM,
    MINICPM,
    MISTRAL,
    COHERE,
    FUNCTION_GEMMA,
    GIGACHAT,
    NEMOTRON,
    LFM2,
    OLMO3,
    PHI4,
    QWEN,
    GRANITE,
    MINIMAX_M1,
    PYTHONIC,
    LLAMA,
    XLAM,
)
"""The first one that fits counts: marks of the stronger evidence stand first."""

FAMILIES: Mapping[str, ModelFormat] = {one.name: one for one in (*MODEL_FORMATS, GENERIC)}
"""By what `MODEL_FAMILY` may say."""

NOTATIONS: Mapping[str, Notation] = {
    one.name: one for one in (*(one for family in MODEL_FORMATS for one in family.notations), QWEN_BARE)
}
"""Harmony is not here: its calls are messages."""


@cache
def ordered(first: tuple[str, ...]) -> tuple[Notation, ...]:
    """Every notation, those named in `first` before the others. KeyError for a name that no row has."""
    named = tuple(NOTATIONS[name] for name in first)
    return (*named, *(one for one in NOTATIONS.values() if one not in named))


def native(names: Sequence[str], template: str) -> CallText:
    """How a model calls: as its template shows it, else as its family does, else as most do."""
    texts = [text for name in (*names, _USUAL) if (text := NOTATIONS[name].text)]
    return next((text for text in texts if text.mark and text.mark in template), texts[0])


_USUAL = "hermes"


def named(name: str) -> Family:
    """The family that `MODEL_FAMILY` names. KeyError for a name that no format has."""
    return FAMILIES[name].family


def detect(
    config: Mapping[str, Json], template: str, added_tokens: Sequence[str], rendered: str = ""
) -> Family:
    """The family of a model, from what its files say.

    The template counts more than the vocabulary, and that more than the architecture's name: a fine-tune may
    change the template, and keeps the others.

    Args:
        rendered: conversations as the template renders them: marks may be put together there.
    """
    known, shown = frozenset(added_tokens), f"{template}\n{rendered}"
    return _with_real_thoughts(_likeliest(config, shown, known), shown, known)


def _likeliest(config: Mapping[str, Json], template: str, added_tokens: frozenset[str]) -> ModelFormat:
    """By the strongest evidence that there is; the vocabulary of a fine-tune has the marks of its origin."""
    model_type = str(config.get("model_type", ""))
    evidence: tuple[Callable[[ModelFormat], bool], ...] = (
        lambda one: any(mark in template for mark in one.marks),
        lambda one: not added_tokens.isdisjoint(one.marks),
    )
    for fits in evidence:
        for one in MODEL_FORMATS:
            if fits(one):
                return one
    return _of_type(model_type)


def _of_type(model_type: str) -> ModelFormat:
    """The format with the longest beginning of this name: MiniMax-M1 writes otherwise than M2."""
    known = {kind: one for one in MODEL_FORMATS for kind in one.types if model_type.startswith(kind)}
    return known[max(known, key=len)] if known else GENERIC


def _with_real_thoughts(model: ModelFormat, template: str, added_tokens: frozenset[str]) -> Family:
    """A model that knows no mark of thoughts writes none, so an answer that quotes one is an answer."""
    candidates = dict.fromkeys(filter(None, (model.thought, *THOUGHT_MARKS)))
    shown = [marks for marks in candidates if marks.closing in template]
    known = [marks for marks in candidates if marks.closing in added_tokens]
    for marks in (*shown, *known):
        return replace(model.family, thought=_as_usual(marks, model))
    return replace(model.family, thought=None, orphan_close=False)


def _as_usual(marks: ThoughtMarks, model: ModelFormat) -> ThoughtMarks:
    """As this model closes them, if they are those that it has as a rule."""
    usual = model.thought
    return usual if usual and (usual.opening, usual.closing) == (marks.opening, marks.closing) else marks
