"""Replies and what they mean, a table for each format."""

from collections.abc import Mapping

from tests.output.corpus import (
    gemma4,
    glm,
    harmony,
    hermes,
    kimi,
    llama,
    minicpm,
    mistral,
    qwen_xml,
    thoughts,
    typed,
)
from tests.output.corpus.case import Case
from tests.output.corpus.common import common_cases

_TABLES = {
    "hermes": hermes.CASES,
    "qwen_xml": qwen_xml.CASES,
    "glm": glm.CASES,
    "minicpm": minicpm.CASES,
    "gemma4": gemma4.CASES,
    "mistral": mistral.CASES,
    "kimi": kimi.CASES,
    "llama": llama.CASES,
    "harmony": harmony.CASES,
    "thoughts": thoughts.CASES,
    "typed": typed.CASES,
}


def _all() -> Mapping[str, Case]:
    cases: dict[str, Case] = {}
    tables = [(table, case) for table, rows in _TABLES.items() for case in rows]
    for table, case in [*common_cases(), *tables]:
        name = f"{table}: {case.name}"
        assert name not in cases, name
        cases[name] = case
    return cases


CORPUS = _all()
