"""Tools of OpenAI's protocols that run on OpenAI's servers, and requests that demand one.

This server cannot run them, and the model would invent their results.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from start_llm.protocols.base import ParsedRequest, RequestContext
from start_llm.protocols.fields import Fields
from start_llm.protocols.tool_types import unavailable_text

_ALLOWED = "allowed_tools"


def tools_elsewhere(
    body: Fields, names: Collection[str], runs_elsewhere: Callable[[Fields], bool]
) -> list[str]:
    """Return the types of the request's tools that OpenAI runs.

    Args:
        names: the tools that the model may call; a type that is one of them is not meant.
    """
    kinds = [tool.required_text("type") for tool in body.objects("tools") if runs_elsewhere(tool)]
    return [kind for kind in kinds if kind not in names]


def allowed_tools(choice: Fields) -> tuple[Fields, str]:
    """Return what has the allowed tools and their mode. Chat completions nest it one object deeper.

    Raises:
        InvalidRequest: an unknown mode.
    """
    allowed = choice.object(_ALLOWED) or choice
    mode = allowed.text("mode") or "auto"
    if mode not in ("auto", "required"):
        raise allowed.fail("mode", f"is {mode!r}; it must be 'auto' or 'required'")
    return allowed, mode


def demanded_tool(body: Fields, names: Collection[str], elsewhere: Sequence[str]) -> str | None:
    """Return the type of a tool that must be called and that OpenAI runs; None without such a demand.

    Args:
        names: the tools that the model may call.
    """
    value = body.value("tool_choice")
    if not isinstance(value, dict):
        return elsewhere[0] if value == "required" and elsewhere and not names else None
    choice = Fields(value, "tool_choice")
    kind = choice.value("type")
    if kind != _ALLOWED:
        return kind if isinstance(kind, str) and kind in elsewhere else None
    allowed, mode = allowed_tools(choice)
    kinds = [tool.value("type") for tool in allowed.objects("tools")]
    demanded = [one for one in kinds if isinstance(one, str) and one in elsewhere]
    return demanded[0] if mode == "required" and demanded and len(demanded) == len(kinds) else None


def answered_elsewhere(parsed: ParsedRequest, demanded: str | None, context: RequestContext) -> ParsedRequest:
    """Return the request with words in place of the model's reply, if such a tool is demanded."""
    if demanded is None:
        return parsed
    context.notices.tell(f"The tool {demanded!r} runs on OpenAI's servers: it is answered as unavailable.")
    return replace(parsed, unavailable=unavailable_text(demanded, "OpenAI"))
