"""Finds out how much of a tool's schema a chat template shows, and what a tool must have."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace

from start_llm.core.chat import Json
from start_llm.prompt.facts import TemplateFacts
from start_llm.prompt.probe import USER, TemplateProbe, Tools
from start_llm.prompt.schemas import fitted, parts

_ARGUMENTS: tuple[Mapping[str, Json], ...] = (
    {"type": "string"},
    {"type": "string", "description": "probeabout"},
    {"type": "integer", "description": "probecount"},
    {"type": "string", "enum": ["probechoiceone", "probechoicetwo"]},
    {"type": "string", "default": "probedefault"},
    {"type": "string", "const": "probeconst"},
    {"type": ["string", "null"], "description": "probenullable"},
    {"type": "string", "format": "probeformat", "pattern": "probepattern", "title": "probetitle"},
    {"type": "integer", "minimum": 73517, "maximum": 97153},
    {"type": "array", "items": {"type": "string"}, "description": "probelist"},
    {"type": "array", "items": {"type": "string", "description": "probeeach"}},
    {"type": "array", "items": {"type": "string", "enum": ["probeitemone", "probeitemtwo"]}},
    {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "probefield": {"type": "string", "description": "probewhatfield"},
                "probephase": {"type": "string", "enum": ["probestateone", "probestatetwo"]},
                "probedeep": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"probelow": {"type": "string", "description": "probewhatlow"}},
                    },
                },
            },
        },
    },
    {
        "type": "object",
        "properties": {
            "probemember": {"type": "string", "description": "probewhatmember", "enum": ["probechosen"]}
        },
    },
    {
        "anyOf": [
            {"type": "string", "enum": ["probeeither"]},
            {"type": "object", "properties": {"probeor": {"type": "string", "description": "probewhator"}}},
        ]
    },
    {"type": "object", "additionalProperties": {"type": "string", "description": "probeadditional"}},
)
_WORD = re.compile(r"probe[a-z]+|73517|97153")
_BARE: tuple[Mapping[str, Json], ...] = (
    {"name": "probebare"},
    {"name": "probebare", "description": "probeabout"},
    {"name": "probebare", "parameters": {"type": "object", "properties": {"probekey": {"type": "string"}}}},
    {"name": "probebare", "description": "probeabout", "parameters": {}},
    {"name": "probebare", "description": "probeabout", "parameters": {"type": "object"}},
)


def tool_facts(probe: TemplateProbe, facts: TemplateFacts) -> TemplateFacts:
    """Add what is shown of tools, if the template shows tools."""
    if not facts.takes_tools:
        return facts
    facts = replace(facts, takes_bare_tools=all(_shows(probe, _tool(bare), facts) for bare in _BARE))
    if _shows(probe, _with_arguments(*_ARGUMENTS), facts):
        return facts
    shown = [one for one in _ARGUMENTS if _shows(probe, _with_arguments(one), facts)]
    refused = [one for one in _ARGUMENTS if not _is_taken(probe, _with_arguments(one), facts)]
    return replace(facts, schema_parts=_parts(*shown), refused_parts=_parts(*refused) - _parts(*shown))


def _parts(*schemas: Mapping[str, Json]) -> frozenset[str]:
    """Return the schema parts of arguments with these schemas."""
    return frozenset(part for one in schemas for part in ("properties", *parts(dict(one), "properties.")))


def _tool(function: Mapping[str, Json]) -> Mapping[str, Json]:
    return {"type": "function", "function": dict(function)}


def _with_arguments(*schemas: Mapping[str, Json]) -> Mapping[str, Json]:
    properties: dict[str, Json] = {
        f"probeargument{chr(ord('a') + number)}": dict(one) for number, one in enumerate(schemas)
    }
    required: list[Json] = [next(iter(properties))]
    parameters: Json = {"type": "object", "properties": properties, "required": required}
    return _tool({"name": "probetool", "description": "probedescription", "parameters": parameters})


def _shows(probe: TemplateProbe, tool: Mapping[str, Json], facts: TemplateFacts) -> bool:
    """Return whether all words of the tool are shown after it is fitted to the template."""
    words, tools = set(_WORD.findall(json.dumps(tool))), _tools(tool, facts)
    return all(word in text for text in _texts(probe, tools) for word in words)


def _is_taken(probe: TemplateProbe, tool: Mapping[str, Json], facts: TemplateFacts) -> bool:
    return all(_texts(probe, _tools(tool, facts)))


def _tools(tool: Mapping[str, Json], facts: TemplateFacts) -> Tools:
    return (fitted(tool, facts),)


def _texts(probe: TemplateProbe, tools: Tools) -> list[str]:
    return [probe.text(*lead, USER, tools=tools, add_generation_prompt=True) for lead in probe.leads]
