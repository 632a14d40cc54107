"""Finds out how much of a tool's schema a chat template shows, and what a tool must have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from start_llm.core.chat import Json
from start_llm.prompt.template_audit.facts import TemplateFacts
from start_llm.prompt.template_audit.probe import TemplateProbe
from start_llm.prompt.template_audit.tool_forms import ToolForms, is_changed

_ARGUMENTS: Mapping[str, Json] = {
    "probeplain": {"type": "string"},
    "probetold": {"type": "string", "description": "probeabout", "default": "probedefault"},
    "probechoice": {"type": "string", "enum": ["probechoiceone", "probechoicetwo"]},
    "probelist": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "probefield": {"type": "string", "description": "probewhatfield", "enum": ["probestate"]}
            },
        },
    },
    "probeeither": {"anyOf": [{"type": "string", "const": "probeconst"}, {"type": "null"}]},
}
_FUNCTIONS: tuple[Mapping[str, Json], ...] = (
    {"name": "probebare"},
    {"name": "probebare", "description": "probeabout"},
    {"name": "probebare", "parameters": {"type": "object", "properties": {"probekey": {"type": "string"}}}},
    {"name": "probebare", "description": "probeabout", "parameters": {}},
    *(
        {
            "name": "probetool",
            "description": "probedescription",
            "parameters": {"type": "object", "properties": {name: schema}, "required": [name]},
        }
        for name, schema in _ARGUMENTS.items()
    ),
)


def tool_facts(probe: TemplateProbe, facts: TemplateFacts) -> TemplateFacts:
    """Add what must be done for tools, if the template shows tools."""
    tools = [{"type": "function", "function": dict(function)} for function in _FUNCTIONS]
    forms = ToolForms(probe.tokenizer, facts).shown(tools)
    changes = [is_changed(tool, form) for tool, form in zip(tools, forms, strict=True)]
    return replace(
        facts,
        takes_bare_tools=not any(is_filled for is_filled, _ in changes),
        shows_schemas=not any(is_told for _, is_told in changes),
    )
