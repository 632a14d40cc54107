"""A tool that may be called, as a grammar looks at it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from start_llm.core.chat import Json
from start_llm.core.errors import InvalidRequest
from start_llm.formats.writing.lark import Origin


@dataclass(frozen=True, slots=True)
class Offered:
    """A tool that may be called. `parameters` is the schema of its arguments."""

    name: str
    parameters: Mapping[str, Json]

    @property
    def properties(self) -> Mapping[str, Json]:
        found = self.parameters.get("properties")
        return found if isinstance(found, dict) else {}

    @property
    def required(self) -> Sequence[str]:
        found = self.parameters.get("required")
        return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []

    @property
    def origin(self) -> Origin:
        return Origin("tools", f"the parameters of {self.name!r}")

    @property
    def definition(self) -> Mapping[str, Json]:
        """The tool as OpenAI's chat protocol has it."""
        return {"type": "function", "function": {"name": self.name, "parameters": dict(self.parameters)}}

    def has_no_form_for(self, argument: str) -> InvalidRequest:
        problem = f"'tools': {argument!r} of {self.name!r} has no form in this model's calls."
        return InvalidRequest(problem, param="tools")
