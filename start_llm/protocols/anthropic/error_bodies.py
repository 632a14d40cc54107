"""Encodes errors with Anthropic's types and messages, to which its clients react."""

import re
from collections.abc import Mapping

from start_llm.core.chat import Json
from start_llm.core.errors import ContextOverflow, InvalidImage, RequestError, anthropic_type
from start_llm.images.problems import ImageProblem
from start_llm.protocols.fields import Fields

_IN_A_RESULT = re.compile(r"(\.content\[\d+\])(\.content)")
_SOURCES: Mapping[str, str] = {"source.data": ".source.base64", "source.url": ".source.url"}
"""How the path of an image goes on, for each field that holds one."""


def anthropic_error(message: str, *, status: int, request_id: str) -> dict[str, Json]:
    """Return the body of an error with this status code."""
    kind = anthropic_type(status)
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def anthropic_refusal(error: RequestError, request_id: str) -> dict[str, Json]:
    """Encode a refusal. Replies are limited to the remaining context, so only prompts can be too long."""
    message = _overflow(error) if isinstance(error, ContextOverflow) else error.message
    return anthropic_error(message, status=error.status, request_id=request_id)


def refuse_image(block: Fields, name: str, problem: ImageProblem) -> InvalidImage:
    """Return the error for an image, with its place as Anthropic's API names it.

    So Claude Code knows which image to leave out from then on.
    """
    place = _IN_A_RESULT.sub(r"\1.tool_result\2", block.path).replace("[", ".").replace("]", "")
    field = f"{place}.image{_SOURCES.get(name, '')}"
    return InvalidImage(f"{field}: {problem.message}.", param=block.path, code=problem.code)


def _overflow(error: ContextOverflow) -> str:
    """Return the message. The maximum leaves room for one token of the reply."""
    return f"prompt is too long: {error.prompt_tokens} tokens > {error.window - 1} maximum"
