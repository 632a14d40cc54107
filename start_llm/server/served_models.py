"""The models that requests can name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from start_llm.protocols.base import ModelFacts
from start_llm.service import Service


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model: the service that answers its requests, and the facts that parsers need."""

    service: Service
    facts: ModelFacts


@dataclass(frozen=True, slots=True)
class ServedModels:
    """Loaded models by id, and the one that answers requests for any other name.

    Clients send names of their own (`gpt-5`, `claude-haiku`), so an unknown name is no error.
    """

    default: ServedModel
    by_id: Mapping[str, ServedModel] = field(default_factory=dict[str, ServedModel])

    def named(self, name: object) -> ServedModel:
        """Return the model of this id, else the default."""
        return self.by_id.get(name, self.default) if isinstance(name, str) else self.default
