"""Check every request before LiteLLM sees it: caller, route, headers, body type and body size.

LiteLLM has about a thousand routes. A tenth of them need no authentication (logins, `/health/drain`, MCP,
whole pages). Some of the others reveal the configuration, or send completions of their own (`/health`). So
only `OPEN_ROUTES` can be reached, and every other path returns 404. Of the headers only those pass that the
server reads, or the applications behind this one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from start_llm.access.access_policy import AccessPolicy, body_length, demand_json, is_chunked
from start_llm.access.backend_secret import CLIENT_HEADER, READINESS_HEADER, BackendSecret
from start_llm.access.client_name import client_name
from start_llm.access.request_target import origin_form
from start_llm.access.tenants import TENANT_HEADER, key_of, tenant_of_key
from start_llm.core.errors import LengthRequired, RequestError
from start_llm.proxy.asgi import Application, Receive, Send
from start_llm.proxy.backend import PASSED_ON
from start_llm.proxy.open_routes import OPEN_ROUTES
from start_llm.proxy.refusals import encoded, refuse, respond

_LET_IN = PASSED_ON - {READINESS_HEADER} | {"host", "accept", "content-length", "content-encoding"}
"""Headers that the applications behind this one get. Besides these, the proxy adds its own."""


class ProxyAccessPolicy:
    """ASGI middleware that refuses a request, or passes it on with its caller's tenant and program.

    Args:
        secret: shared with the server.
        max_body_bytes: the longest request body that is accepted.
    """

    def __init__(
        self, inside: Application, access_policy: AccessPolicy, secret: BackendSecret, max_body_bytes: int
    ) -> None:
        self._inside = inside
        self._access_policy = access_policy
        self._secret = secret
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._answer(scope, receive, send)
            case "websocket":
                # A close before the accept gives the client a 403.
                await send({"type": "websocket.close", "code": 1008})
            case _:
                await self._inside(scope, receive, send)

    async def _answer(self, scope: Any, receive: Receive, send: Send) -> None:
        scope = _in_origin_form(scope)
        headers = [
            (name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]
        ]
        by_name = dict(headers)
        send = _with_headers(send, self._access_policy.origins.headers(by_name))
        try:
            if self._access_policy.origins.is_preflight(scope["method"], by_name):
                self._access_policy.admit(headers, scope["server"][0], asks_key=False)
                await respond(send, 204, self._access_policy.origins.preflight(by_name), b"")
                return
            self._admit(scope, headers)
        except RequestError as error:
            await refuse(scope, send, error)
            return
        await self._inside(scope | {"headers": self._passed_on(headers)}, receive, send)

    def _admit(self, scope: Any, headers: Sequence[tuple[str, str]]) -> None:
        asks_key = OPEN_ROUTES.asks_key(scope["path"])
        self._access_policy.admit(headers, scope["server"][0], asks_key=asks_key)
        OPEN_ROUTES.find(scope["method"], scope["path"])
        by_name = dict(headers)
        if scope["method"] == "POST":
            demand_json(by_name.get("content-type"))
        elif is_chunked(by_name):
            raise LengthRequired("The body of another method than POST needs Content-Length.")
        body_length(by_name, self._max_body_bytes)  # here, as all of the body is read into memory first

    def _passed_on(self, headers: Sequence[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
        """Return the headers that the server reads, and who the caller is."""
        by_name = dict(headers)
        kept = [(name, value) for name, value in headers if name in _LET_IN]
        own = {TENANT_HEADER: tenant_of_key(key_of(by_name)), CLIENT_HEADER: client_name(by_name)}
        if by_name.get(READINESS_HEADER) == self._secret.readiness:
            own[READINESS_HEADER] = self._secret.readiness
        return encoded([*kept, *own.items()])


def _in_origin_form(scope: Any) -> Any:
    """Return a scope whose path has no scheme and host. The host goes to the headers, to the other one."""
    path, host = origin_form(scope["path"])
    if host is None:
        return scope
    headers = [*scope["headers"], (b"host", host.encode("latin-1", "replace"))]
    raw_path, _ = origin_form(scope["raw_path"].decode("latin-1"))
    return scope | {"path": path, "raw_path": raw_path.encode("latin-1"), "headers": headers}


def _with_headers(send: Send, headers: Mapping[str, str]) -> Send:
    """Return a `send` that adds these headers to the reply."""

    async def send_with_headers(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = message | {"headers": [*message.get("headers", ()), *encoded(headers.items())]}
        await send(message)

    return send_with_headers if headers else send
