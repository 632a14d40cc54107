"""Encodes errors with Anthropic's types and messages, to which its clients react."""

from __future__ import annotations

from collections.abc import Mapping

from start_llm.core.chat import Json
from start_llm.core.errors import ContextOverflow, RequestError

_KINDS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def anthropic_error(message: str, *, status: int, request_id: str) -> dict[str, Json]:
    """Return the body of an error with this status code."""
    kind = _KINDS.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def anthropic_refusal(error: RequestError, request_id: str) -> dict[str, Json]:
    """Encode a refusal. Replies are limited to the remaining context, so only prompts can be too long."""
    message = _overflow(error) if isinstance(error, ContextOverflow) else error.message
    return anthropic_error(message, status=error.status, request_id=request_id)


def _overflow(error: ContextOverflow) -> str:
    """Return the message. The maximum leaves room for one token of the reply."""
    return f"prompt is too long: {error.prompt_tokens} tokens > {error.window - 1} maximum"
