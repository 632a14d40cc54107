"""Lead a browser that opens the proxy's address to the status page, which the server has."""

from typing import Any
from urllib.parse import urlsplit

from start_llm.access.accept_header import prefers_html
from start_llm.access.access_policy import is_loopback
from start_llm.proxy.asgi import Application, Receive, Send


class ToStatusPage:
    """ASGI middleware: a redirect for browsers that ask for `/`; everything else is passed on.

    Args:
        server: the server's address, such as `http://127.0.0.1:8080`.
    """

    def __init__(self, inside: Application, server: str) -> None:
        self._inside = inside
        self._server = urlsplit(server)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if not _is_browser_at_the_root(scope):
            await self._inside(scope, receive, send)
            return
        headers = [
            (b"location", self._location(_header(scope, b"host")).encode("latin-1")),
            (b"vary", b"Accept"),
            (b"cache-control", b"no-store"),
            (b"content-length", b"0"),
        ]
        await send({"type": "http.response.start", "status": 307, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    def _location(self, host: str) -> str:
        """Return the page's address under the host name that the browser used, if the server has it too.

        A server that listens at one address only, other than loopback, has no other name.
        """
        own = self._server.hostname or ""
        name = urlsplit(f"//{host}").hostname or own
        name = name if is_loopback(own) else own
        return f"http://{f'[{name}]' if ':' in name else name}:{self._server.port}/"


def _is_browser_at_the_root(scope: Any) -> bool:
    if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD") or scope["path"].strip("/"):
        return False
    return prefers_html(_header(scope, b"accept"))


def _header(scope: Any, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name), "")
