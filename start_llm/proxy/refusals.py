"""Tell the server, by lines of the proxy's output, what the proxy has refused or left out itself."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

_MARK = "start_llm refused "
_NOTICE = "start_llm notice "
_LONGEST = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyRefusal:
    """A request that neither LiteLLM nor the server has seen."""

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
        told = json.loads(line.removeprefix(_NOTICE))
    except ValueError:
        return None
    return "".join(filter(str.isprintable, told)) if isinstance(told, str) else None


def refusal_in(line: str) -> ProxyRefusal | None:
    """Return the refusal that a line of the proxy's output tells of; None if it is another line."""
    if not line.startswith(_MARK):
        return None
    try:
        return ProxyRefusal(**json.loads(line.removeprefix(_MARK)))
    except (ValueError, TypeError):
        return None
