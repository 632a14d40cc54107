"""Defines a callable tool, as the grammar writers need it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from start_llm.core.chat import Json, TextGrammar
from start_llm.core.errors import InvalidRequest
from start_llm.formats.writing.lark import SchemaOrigin


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A callable tool. `parameters` is the schema of its arguments, `grammar` what its only text follows."""

    name: str
    parameters: Mapping[str, Json]
    grammar: TextGrammar | None = None

    @property
    def properties(self) -> Mapping[str, Json]:
        properties = self.parameters.get("properties")
        return properties if isinstance(properties, dict) else {}

    @property
    def required(self) -> Sequence[str]:
        required = self.parameters.get("required")
        return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []

    @property
    def takes_others(self) -> bool:
        """True if it says that there may be arguments which it does not name."""
        return self.parameters.get("additionalProperties") not in (None, False)

    def schema_of(self, argument: str) -> Json:
        """Return the schema of an argument, which it may not name. None: it says nothing of it."""
        return self.properties.get(argument, self.parameters.get("additionalProperties"))

    @property
    def origin(self) -> SchemaOrigin:
        return SchemaOrigin("tools", f"the parameters of {self.name!r}")

    @property
    def definition(self) -> Mapping[str, Json]:
        """The tool in the format of OpenAI's chat protocol."""
        return {"type": "function", "function": {"name": self.name, "parameters": dict(self.parameters)}}

    def has_no_form_for(self, argument: str) -> InvalidRequest:
        problem = f"'tools': {argument!r} of {self.name!r} has no form in this model's calls."
        return InvalidRequest(problem, param="tools")
