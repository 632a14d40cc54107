"""Let pages of some other origins use the server: which ones, and the headers for their browsers (CORS).

A browser asks first (a preflight request) before it lets a page send JSON to another origin. It lets the page
read a reply only if the reply names the page's origin.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_ANY = "://*"
_HEADER_NAMES = re.compile(r"[A-Za-z0-9-]+(?:\s*,\s*[A-Za-z0-9-]+)*")
_REQUESTED_METHOD = "access-control-request-method"
_REQUESTED_HEADERS = "access-control-request-headers"
_KEPT_S = 600


@dataclass(frozen=True, slots=True)
class AllowedOrigins:
    """Origins such as `http://localhost:3000`, or `vscode-webview://*` for all of a scheme."""

    listed: tuple[str, ...] = ()

    def allow(self, origin: str) -> bool:
        origin = origin.lower()
        return any(
            origin.startswith(listed[:-1]) if listed.endswith(_ANY) else origin == listed
            for listed in map(str.lower, self.listed)
        )

    def headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Return what a reply has to say to the page that asked; nothing to other clients.

        Args:
            headers: the request's, with lower-case names.
        """
        origin = headers.get("origin", "")
        if not self.allow(origin):
            return {}
        return {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}

    def is_preflight(self, method: str, headers: Mapping[str, str]) -> bool:
        """Return whether a browser asks on behalf of an allowed page what that page may send."""
        return method == "OPTIONS" and _REQUESTED_METHOD in headers and self.allow(headers.get("origin", ""))

    def preflight(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Return the headers of the reply to a preflight request, besides those of `headers`."""
        wanted = headers.get(_REQUESTED_HEADERS, "")
        reply = {
            "Access-Control-Allow-Methods": "GET, HEAD, POST, DELETE",
            "Access-Control-Max-Age": str(_KEPT_S),
        }
        if _HEADER_NAMES.fullmatch(wanted):
            reply["Access-Control-Allow-Headers"] = wanted
        if headers.get("access-control-request-private-network") == "true":
            reply["Access-Control-Allow-Private-Network"] = "true"
        return reply


NO_ORIGINS = AllowedOrigins()
