"""Who may talk to a port: under which names, from which pages, with which keys. Both servers ask it.

A web page in the user's browser can send requests to this machine. It cannot choose the Host that it names,
or leave its Origin out of a POST, and it cannot say that a body is JSON without asking first.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

from start_llm.core.errors import Forbidden, InvalidRequest, Unauthorized, UnsupportedMediaType
from start_llm.core.tenants import key_of, tenant_of_key

_ONCE = ("host", "origin", "authorization", "x-api-key", "content-type")
_HOST = re.compile(r"(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::\d{1,5})?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Door:
    """Lets requests in.

    Attributes:
        keys: each of them opens; empty: none is asked for.
        names: those that the server may be called by, beside loopback and the address that was connected to.
    """

    keys: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()

    def admit(self, headers: Iterable[tuple[str, str]], address: str, *, asks_key: bool = True) -> None:
        """Let a request in whose headers these are.

        Args:
            address: the one at this end of the connection.
            asks_key: whether what is asked for needs a key, if there is one.

        Raises:
            InvalidRequest: a header that decides something is there twice.
            Forbidden: for a name that is not the server's, or from a web page.
            Unauthorized: without a key that opens.
        """
        said = _said_once(headers)
        self._check_host(said, address)
        _check_origin(said)
        if asks_key:
            self._check_key(said)

    def _check_host(self, said: Mapping[str, str], address: str) -> None:
        """A page's own name may be made to lead here (DNS rebinding); then it says that name."""
        host = said.get("host")
        # Only what is no browser leaves it out.
        if host is None:
            return
        match = _HOST.fullmatch(host)
        name = (match["v6"] or match["name"]).lower().rstrip(".") if match else ""
        if not (name in self.names or is_loopback(name) or _is_address(name, address)):
            raise Forbidden(
                "This server does not answer to the name in Host. Use localhost, its address, or a name that "
                "ALLOWED_HOSTS lists."
            )

    def _check_key(self, said: Mapping[str, str]) -> None:
        given = tenant_of_key(key_of(said))
        # Digests, and all of them: how long it takes tells nothing of a key.
        matches = [hmac.compare_digest(given, tenant_of_key(key)) for key in self.keys]
        if self.keys and not any(matches):
            problem = "This is not a key of this server" if given else "This server asks for an API key"
            raise Unauthorized(f"{problem}: send it as Authorization: Bearer KEY, or as x-api-key.")


def demand_json(content_type: str | None) -> None:
    """A page may send a form or plain text to anybody without asking, and also a body without any type.

    Raises:
        UnsupportedMediaType: the body is not said to be JSON.
    """
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind != "application/json":
        said = f"not {kind[:80]}" if kind else "and the request has none"
        raise UnsupportedMediaType(f"The Content-Type of a body must be application/json, {said}.")


def is_loopback(name: str) -> bool:
    """Whether nobody outside of this machine is meant by it."""
    address = _address(name)
    return name == "localhost" if address is None else address.is_loopback


def _said_once(headers: Iterable[tuple[str, str]]) -> Mapping[str, str]:
    said: dict[str, str] = {}
    for name, value in headers:
        lower = name.lower()
        if lower in _ONCE and said.setdefault(lower, value.strip()) != value.strip():
            raise InvalidRequest(f"{lower} is given twice, and not the same.")
    return said


def _check_origin(said: Mapping[str, str]) -> None:
    """No page is served here, so one that is of the same origin has been put there by the user."""
    origin = said.get("origin")
    if origin is not None and _netloc(origin) != said.get("host", "").lower():
        raise Forbidden("Requests from web pages are not served.")


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def _is_address(name: str, address: str) -> bool:
    own = _address(address)
    return own is not None and _address(name) == own


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address
