"""Errors in Anthropic's words, which its clients act on."""

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
    """The body of an error with this status code."""
    kind = _KINDS.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def anthropic_refusal(error: RequestError, request_id: str) -> dict[str, Json]:
    """A reply is limited to the room that its prompt leaves, so nothing but a prompt can be too long."""
    message = _overflow(error) if isinstance(error, ContextOverflow) else error.message
    return anthropic_error(message, status=error.status, request_id=request_id)


def _overflow(error: ContextOverflow) -> str:
    """A prompt has to leave room for one token."""
    return f"prompt is too long: {error.prompt_tokens} tokens > {error.window - 1} maximum"
