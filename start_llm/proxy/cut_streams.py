"""Say in plain words that the server ended in the middle of a streamed reply.

LiteLLM passes on what its HTTP library says: "Response payload is not completed: <TransferEncodingError>".
"""

import json
from typing import Any

from start_llm.proxy.error_text import Application, Receive, Send

_LIBRARYS = "Response payload is not completed"
_PLAIN = (
    "Connection lost: the server ended in the middle of this reply. What came before is all that there is. "
    "You can retry your request."
)
"""With words by which clients know what to try again: pi ends its turn at an error that has none of them."""
_DATA = b"data: "


class CutStreams:
    """ASGI middleware around LiteLLM that rewrites the error with which a cut stream ends."""

    def __init__(self, litellm: Application) -> None:
        self._litellm = litellm

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        async def sending(message: Any) -> None:
            if _LIBRARYS.encode() in message.get("body", b""):
                lines = message["body"].split(b"\n")
                message = message | {"body": b"\n".join(map(_rewritten, lines))}
            await send(message)

        await self._litellm(scope, receive, sending)


def _rewritten(line: bytes) -> bytes:
    """Return a line of a stream; if it is the event of such an error, with other words."""
    if not line.startswith(_DATA):
        return line
    try:
        event = json.loads(line[len(_DATA) :])
    except ValueError:
        return line
    error = _error(event)
    if error is None or _LIBRARYS not in str(error.get("message")):
        return line
    error["message"] = _PLAIN
    return _DATA + json.dumps(event).encode()


def _error(event: Any) -> dict[str, Any] | None:
    """Return the error object of an event in any protocol's form; None if it is no error."""
    if not isinstance(event, dict):
        return None
    holder = event.get("response") if event.get("type") == "response.failed" else event
    error = holder.get("error") if isinstance(holder, dict) else None
    return error if isinstance(error, dict) else None
