"""The table of tool-call formats. A new format is a file, and a row here."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from start_llm.output.tool_calls.base import Format
from start_llm.output.tool_calls.gemma4 import GEMMA4
from start_llm.output.tool_calls.glm import GLM
from start_llm.output.tool_calls.hermes import HERMES
from start_llm.output.tool_calls.kimi import KIMI
from start_llm.output.tool_calls.llama import LLAMA_BARE, LLAMA_TAGGED
from start_llm.output.tool_calls.minicpm import MINICPM
from start_llm.output.tool_calls.mistral import MISTRAL_HEADED, MISTRAL_LIST
from start_llm.output.tool_calls.qwen_xml import QWEN_BARE, QWEN_XML

FORMATS: Mapping[str, Format] = {
    one.name: one
    for one in (
        HERMES,
        QWEN_XML,
        GLM,
        GEMMA4,
        MINICPM,
        MISTRAL_LIST,
        MISTRAL_HEADED,
        KIMI,
        LLAMA_TAGGED,
        LLAMA_BARE,
        QWEN_BARE,
    )
}
"""Harmony is not here: its calls are messages, which `output.channels` reads."""


@cache
def ordered(first: tuple[str, ...]) -> tuple[Format, ...]:
    """Every format, those named in `first` before the others. KeyError for a name that no row has."""
    named = tuple(FORMATS[name] for name in first)
    return (*named, *(one for one in FORMATS.values() if one not in named))
