"""Replaces the content of written files by a digest: NORMALIZE_WRITE_TOOL_CONTENT_FOR_PROMPT.

The model no longer sees what it wrote, and may write it again from memory. So this is off by default.
"""

import hashlib
from dataclasses import replace

from start_llm.core.chat import Message, ToolCall

_WRITER, _ARGUMENT = "write", "content"


def with_short_content(call: ToolCall) -> ToolCall:
    """Return the call; if it writes a file, with the content's length and SHA-1 in place of the content."""
    content = call.arguments.get(_ARGUMENT)
    if call.name != _WRITER or not isinstance(content, str):
        return call
    digest = hashlib.sha1(content.encode(errors="surrogatepass"), usedforsecurity=False).hexdigest()
    short = f"[content: {len(content)} characters, sha1 {digest}]"
    return replace(call, arguments={**call.arguments, _ARGUMENT: short})


def with_short_contents(message: Message) -> Message:
    """Return the message with short contents in its calls."""
    if not message.tool_calls:
        return message
    return replace(message, tool_calls=tuple(map(with_short_content, message.tool_calls)))


def is_shortened(message: Message) -> bool:
    """Return whether a prompt would show the message otherwise than it was written."""
    return any(with_short_content(call) != call for call in message.tool_calls)
