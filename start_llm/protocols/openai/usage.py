"""Encodes the end of OpenAI's completions: the last chunk, usage, and the end marker."""

from __future__ import annotations

from collections.abc import Iterator

from start_llm.core.chat import Json
from start_llm.core.events import Usage
from start_llm.protocols.base import SSEFrame


def usage_json(usage: Usage) -> dict[str, Json]:
    """Return the real counts. `cached_tokens` were not computed; `reasoning_tokens` are part of the reply."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.total,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def closing_frames(
    head: dict[str, Json], choice: dict[str, Json], usage: Usage, *, include_usage: bool
) -> Iterator[SSEFrame]:
    """Yield the last frames. Usage is in the last chunk, or in a separate one if the client asked for it."""
    last: dict[str, Json] = {**head, "choices": [choice]}
    if include_usage:
        yield SSEFrame(last)
        yield SSEFrame({**head, "choices": [], "usage": usage_json(usage)})
    else:
        yield SSEFrame({**last, "usage": usage_json(usage)})
    yield SSEFrame("[DONE]")
