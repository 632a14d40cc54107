"""Answers requests for tools that Anthropic runs.

This server cannot run them, and the model would invent their results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from start_llm.core.chat import Json, Message
from start_llm.protocols.base import new_id
from start_llm.protocols.fields import Fields
from start_llm.protocols.openai.chat_input import ToolSchemas, tool_names
from start_llm.protocols.tool_types import anthropic_tool_type, unavailable_text

VENDOR = "Anthropic"
_SEARCH = "web_search"
_LONGEST_QUERY = 400


def demanded_tool(body: Fields, tools: ToolSchemas) -> str | None:
    """Return the name of a tool that must be called and that Anthropic runs; None without such a demand."""
    choice, elsewhere = body.object("tool_choice"), _tools_elsewhere(body)
    kind = choice.text("type") if choice else None
    if choice and kind == "tool":
        name = choice.text("name")
        return name if name in elsewhere and name not in tool_names(tools) else None
    return elsewhere[0] if kind == "any" and elsewhere and not tools else None


def _tools_elsewhere(body: Fields) -> list[str]:
    kinds = ((tool, tool.text("type")) for tool in body.objects("tools"))
    vendors = (tool for tool, kind in kinds if kind and anthropic_tool_type(kind).runs == "vendor")
    return [name for name in (tool.value("name") for tool in vendors) if isinstance(name, str)]


def unavailable_blocks(name: str, messages: Sequence[Message]) -> list[dict[str, Json]]:
    """Return the blocks of a search that failed, as Anthropic's API tells it; none for other tools."""
    if name != _SEARCH:
        return []
    used, asked = new_id("srvtoolu_"), messages[-1].content[:_LONGEST_QUERY]
    error: Json = {"type": "web_search_tool_result_error", "error_code": "unavailable"}
    return [
        {"type": "server_tool_use", "id": used, "name": name, "input": {"query": asked}},
        {"type": "web_search_tool_result", "tool_use_id": used, "content": error},
    ]


def with_notice(body: Fields, tools: ToolSchemas, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Tell the model that the tools are not there, if the request has no others and relies on them."""
    elsewhere = _tools_elsewhere(body)
    if tools or not elsewhere:
        return messages
    notice = "\n".join(unavailable_text(name, VENDOR) for name in elsewhere)
    first, *rest = messages
    if first.role != "system":
        return (Message(role="system", content=notice), *messages)
    return (replace(first, content=f"{first.content}\n\n{notice}"), *rest)
