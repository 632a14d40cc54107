"""Models for tests that load none."""

from __future__ import annotations

from typing import Any

from start_llm.core.family import Family
from start_llm.core.model_card import ModelCard


def model_card(name: str = "m", *, vocabulary: int = 1000, window: int = 1000, **more: Any) -> ModelCard:
    """The card of a model; `more` are other fields of it."""
    family = more.pop("family", Family(name="plain"))
    return ModelCard(id=name, family=family, vocabulary=vocabulary, own_window=window, **more)
