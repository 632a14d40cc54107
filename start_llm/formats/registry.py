"""Lists the model formats and detects the format of a model. A new format is a file and a name here."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain

from start_llm.core.chat import Json
from start_llm.core.family import Family, ReasoningMarks
from start_llm.formats.apertus import APERTUS
from start_llm.formats.deepseek import DEEPSEEK
from start_llm.formats.dsml import DSML, DSML_READ_ONLY
from start_llm.formats.gemma4 import FUNCTION_GEMMA, GEMMA4
from start_llm.formats.glm import GLM
from start_llm.formats.harmony import HARMONY
from start_llm.formats.hunyuan import HUNYUAN, HUNYUAN_WITH_SUFFIX
from start_llm.formats.json_lists import (
    APRIEL,
    COHERE,
    GIGACHAT,
    GRANITE,
    INTERNLM,
    MINIMAX_M1,
    NEMOTRON,
    PHI4,
    XLAM,
)
from start_llm.formats.k2_horizon import K2_HORIZON
from start_llm.formats.kimi import KIMI
from start_llm.formats.kimi_k3 import KIMI_K3
from start_llm.formats.llama import LLAMA, LLAMA_READ_ONLY
from start_llm.formats.longcat import LONGCAT
from start_llm.formats.minicpm import MINICPM
from start_llm.formats.minimax import MINIMAX, MINIMAX_READ_ONLY
from start_llm.formats.minimax_m3 import MINIMAX_M3
from start_llm.formats.mistral import MISTRAL
from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.python_lists import LFM2, OLMO3, PYTHONIC
from start_llm.formats.qwen import ERNIE, QWEN, QWEN_READ_ONLY
from start_llm.formats.reasoning_marks import OTHER_MARKS, THINK
from start_llm.formats.seed import SEED
from start_llm.formats.solar_open import SOLAR_OPEN
from start_llm.formats.step3 import STEP3
from start_llm.formats.writing.call_text import CallText

GENERIC = ModelFormat(name="generic", reasoning=THINK)
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
    K2_HORIZON,
    SOLAR_OPEN,
    HUNYUAN_WITH_SUFFIX,
    HUNYUAN,
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
    APERTUS,
    APRIEL,
    INTERNLM,
    STEP3,
    ERNIE,
    QWEN,
    GRANITE,
    MINIMAX_M1,
    PYTHONIC,
    LLAMA,
    XLAM,
)
"""The first match wins, so formats with more distinctive marks come first."""

FAMILIES: Mapping[str, ModelFormat] = {model.name: model for model in (*MODEL_FORMATS, GENERIC)}
"""Formats by their name in `MODEL_FAMILY`."""

_OWN_MARKS = tuple(
    model.reasoning for model in MODEL_FORMATS if model.reasoning and model.reasoning.is_unmistakable
)
REASONING_MARKS: tuple[ReasoningMarks, ...] = (*_OWN_MARKS, *OTHER_MARKS)
"""Those that any model may have, whatever its calls are: the more unmistakable first."""

_READ_ONLY = (*QWEN_READ_ONLY, *MINIMAX_READ_ONLY, *DSML_READ_ONLY, *LLAMA_READ_ONLY)
"""Notations that models write without being shown them."""

NOTATIONS: Mapping[str, Notation] = {
    notation.name: notation
    for notation in (*(notation for model in MODEL_FORMATS for notation in model.notations), *_READ_ONLY)
}
"""Notations by name. Harmony is missing because its calls are messages."""


@cache
def all_notations(first: tuple[str, ...]) -> tuple[Notation, ...]:
    """Return every notation, those named in `first` before the others.

    Raises:
        KeyError: no notation has this name.
    """
    preferred = tuple(NOTATIONS[name] for name in first)
    return (*preferred, *(notation for notation in NOTATIONS.values() if notation not in preferred))


def preferred_call_text(names: Sequence[str], template: str) -> CallText:
    """Return the call text that the template shows, else the first of these notations, else `_USUAL`."""
    texts = [text for name in (*names, _USUAL) if (text := NOTATIONS[name].text)]
    return next((text for text in texts if text.mark and text.mark in template), texts[0])


_USUAL = "hermes"


def _with_call_text(model: ModelFormat, family: Family, template: str) -> Family:
    """Add the form of calls for a template that shows none: the one that it names, else the format's first.

    Only marked calls are read behind text: where the format's first have no mark, Hermes' form stays.
    """
    names = {
        notation.name: notation.text
        for notation in model.notations
        if notation.text and notation.text.mark and notation.openers
    }
    named = [name for name, text in names.items() if text.mark in template]
    usual = [_USUAL] if _USUAL in names else []
    first = () if family.calls_begin_answers else names
    chosen = next(iter((*named, *usual, *first)), _USUAL)
    return family if chosen == _USUAL else replace(family, write_calls=names[chosen].write)


def family_by_name(name: str) -> Family:
    """Return the family that `MODEL_FAMILY` names.

    Raises:
        KeyError: no format has this name.
    """
    return _with_call_text(FAMILIES[name], FAMILIES[name].family, "")


def detect(
    config: Mapping[str, Json], template: str, added_tokens: Sequence[str], rendered: str = ""
) -> Family:
    """Detect the family of a model from its files.

    The template counts more than the vocabulary, and the vocabulary more than `model_type`: a fine-tune may
    change the template, but it keeps the others.

    Args:
        rendered: conversations rendered by the template, because a template may assemble marks from parts.
    """
    known, shown = frozenset(added_tokens), f"{template}\n{rendered}"
    model = _likeliest(config, shown, known)
    return _with_call_text(model, _with_real_reasoning(model, shown, known), shown)


def _likeliest(config: Mapping[str, Json], template: str, added_tokens: frozenset[str]) -> ModelFormat:
    """Return the format with the strongest evidence. A fine-tune's vocabulary has its base model's marks."""
    shown = (model for model in MODEL_FORMATS if any(mark in template for mark in model.marks))
    known = (model for model in MODEL_FORMATS if not added_tokens.isdisjoint(model.marks))
    return next(chain(shown, known), None) or _of_type(str(config.get("model_type", "")))


def _of_type(model_type: str) -> ModelFormat:
    """Return the format with the longest matching prefix: MiniMax-M1 writes differently from M2."""
    known = {kind: model for model in MODEL_FORMATS for kind in model.types if model_type.startswith(kind)}
    return known[max(known, key=len)] if known else GENERIC


def _with_real_reasoning(model: ModelFormat, template: str, added_tokens: frozenset[str]) -> Family:
    """Use only marks that the model knows. If it knows none, an answer that quotes a mark is an answer."""
    # Of equal pairs the format's own comes first, because its `cut` fits this model.
    candidates = dict.fromkeys(filter(None, (model.reasoning, *REASONING_MARKS)))
    shown = [marks for marks in candidates if marks.closing in template]
    known = [marks for marks in candidates if marks.closing in added_tokens]
    for marks in (*shown, *known):
        return replace(model.family, reasoning=marks)
    return replace(model.family, reasoning=None, orphan_close=False)
