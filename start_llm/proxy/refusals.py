"""Refuse requests in the proxy, and tell the server, by lines of the proxy's output, of it and of notices."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from start_llm.core.errors import RequestError
from start_llm.protocols.base import new_id
from start_llm.protocols.dialects import dialect
from start_llm.proxy.asgi import Send

_MARK = "start_llm refused "
_NOTICE = "start_llm notice "
_LONGEST = 300
_NOTE = "start_llm.note_refusal"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyRefusal:
    """A request that the server has not seen."""

    method: str
    path: str
    status: int
    reason: str

    def as_line(self) -> str:
        """Return it as one line of ASCII, whatever the client has sent."""
        clipped = asdict(self) | {"path": self.path[:_LONGEST], "reason": self.reason[:_LONGEST]}
        return _MARK + json.dumps(clipped)


def tell_server(notice: str) -> None:
    """Print a notice as one line of ASCII."""
    print(_NOTICE + json.dumps(notice[:_LONGEST]), flush=True)


def notice_in(line: str) -> str | None:
    """Return the notice in a line of the proxy's output; None if it is another line."""
    if not line.startswith(_NOTICE):
        return None
    try:
        notice = json.loads(line.removeprefix(_NOTICE))
    except ValueError:
        return None
    return "".join(filter(str.isprintable, notice)) if isinstance(notice, str) else None


def refusal_in(line: str) -> ProxyRefusal | None:
    """Return the refusal that a line of the proxy's output tells of; None if it is another line."""
    if not line.startswith(_MARK):
        return None
    try:
        return ProxyRefusal(**json.loads(line.removeprefix(_MARK)))
    except (ValueError, TypeError):
        return None


def tell_refusal(refusal: ProxyRefusal) -> None:
    """Print a refusal as one line of ASCII."""
    print(refusal.as_line(), flush=True)


def with_note(scope: Any, note: Callable[[ProxyRefusal], None]) -> Any:
    """Return a scope whose refusals are given to `note`, as they may not reach the client."""
    return scope | {_NOTE: note}


async def refuse(scope: Any, send: Send, error: RequestError) -> None:
    """Send an error in the form of the protocol that the path belongs to, and tell the server of it."""
    path = scope["path"].rstrip("/") or "/"
    refusal = ProxyRefusal(method=scope["method"], path=path, status=error.status, reason=error.message)
    scope.get(_NOTE, tell_refusal)(refusal)
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
