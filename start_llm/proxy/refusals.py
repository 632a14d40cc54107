"""Refuse requests in the proxy, and tell the server, by lines of the proxy's output, of it and of notices."""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from start_llm.core.errors import RequestError
from start_llm.protocols.base import new_id
from start_llm.protocols.dialects import dialect
from start_llm.proxy.asgi import Send

_MARK = "start_llm tells "
_LONGEST = 300
_NOTE = "start_llm.note_refusal"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyRefusal:
    """A request that the server has not seen."""

    method: str
    path: str
    status: int
    reason: str


def tell_server(message: ProxyRefusal | str) -> None:
    """Print a refusal or a notice as one line of ASCII, whatever the client has sent.

    Nothing is printed if the server has ended: its client is answered all the same.
    """
    fields = {"notice": message} if isinstance(message, str) else asdict(message)
    clipped = {name: value[:_LONGEST] if isinstance(value, str) else value for name, value in fields.items()}
    with suppress(OSError):
        print(_MARK + json.dumps(clipped), flush=True)


def message_in(line: str) -> ProxyRefusal | str | None:
    """Return what a line of the proxy's output tells the server; None if it is another line."""
    if not line.startswith(_MARK):
        return None
    try:
        match json.loads(line.removeprefix(_MARK)):
            case {"notice": str(notice)}:
                return "".join(filter(str.isprintable, notice))
            case fields:
                return ProxyRefusal(**fields)
    except (ValueError, TypeError):
        return None


def with_note(scope: Any, note: Callable[[ProxyRefusal], None]) -> Any:
    """Return a scope whose refusals are given to `note`, as they may not reach the client."""
    return scope | {_NOTE: note}


async def refuse(scope: Any, send: Send, error: RequestError) -> None:
    """Send an error in the form of the protocol that the path belongs to, and tell the server of it."""
    path = scope["path"].rstrip("/") or "/"
    refusal = ProxyRefusal(method=scope["method"], path=path, status=error.status, reason=error.message)
    scope.get(_NOTE, tell_server)(refusal)
    spoken, name = dialect(path), new_id("req_")
    body = json.dumps(spoken.refusal(error, name)).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **error.headers}
    headers[spoken.id_header] = name
    # The body may be unread. Without a close its bytes could be parsed as the next request.
    headers["Connection"] = "close"
    await respond(send, error.status, headers, body)


async def respond(send: Send, status: int, headers: Mapping[str, str], body: bytes) -> None:
    """Send a whole response."""
    await send({"type": "http.response.start", "status": status, "headers": encoded(headers.items())})
    await send({"type": "http.response.body", "body": body})


def encoded(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    """Return headers as ASGI has them."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
