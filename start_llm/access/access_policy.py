"""Check the Host, Origin and API key of a request, and what it declares of its body.

The server and the proxy both use these rules. A web page in the user's browser can send requests to this
machine. It cannot choose the Host header or leave Origin out of a POST, and it cannot declare a body as JSON
without a preflight request. A GET for an image or a script has no Origin, but browsers say of it in
Sec-Fetch-Site from where it comes.
"""

import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

from start_llm.access.cross_origin import NO_ORIGINS, AllowedOrigins
from start_llm.access.tenants import key_of, tenant_of_key
from start_llm.core.errors import (
    Forbidden,
    InvalidRequest,
    Unauthorized,
    UnsupportedMediaType,
    body_too_large,
)

_ONCE = ("host", "origin", "sec-fetch-site", "authorization", "x-api-key", "content-type")
_OWN_SITES = ("same-origin", "none")
"""Values of Sec-Fetch-Site: the server's own page, and what the user has typed or opened."""
_HOST = re.compile(r"(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::\d{1,5})?", re.IGNORECASE)
_MAX_LENGTH_DIGITS = 18


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """The hosts and keys that a server accepts.

    Attributes:
        keys: any of them is accepted; empty: no key is required.
        names: accepted host names besides loopback and the address of the connection.
        origins: pages of these may use the server, besides its own page.
    """

    keys: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()
    origins: AllowedOrigins = NO_ORIGINS

    def admit(self, headers: Iterable[tuple[str, str]], address: str, *, asks_key: bool = True) -> None:
        """Check a request's headers; return if it is admitted.

        Args:
            address: the local address of the connection.
            asks_key: whether the path requires a key, if there are keys.

        Raises:
            InvalidRequest: a header that these rules read is given twice with different values.
            Forbidden: the Host is not one of the server's, or the request comes from a web page.
            Unauthorized: the key is missing or wrong.
        """
        by_name = _single_values(headers)
        self._check_host(by_name, address)
        self._check_origin(by_name)
        self._check_site(by_name)
        if asks_key:
            self._check_key(by_name)

    def _check_host(self, by_name: Mapping[str, str], address: str) -> None:
        """Check the Host header.

        A web page can make its own host name resolve to this machine (DNS rebinding), but then Host has that
        name.
        """
        host = by_name.get("host")
        # Only clients that are not browsers leave Host out.
        if host is None:
            return
        name = _name_in(host)
        if not (name in self.names or is_loopback(name) or _is_address(name, address)):
            raise Forbidden(
                "This server does not answer to the name in Host. Use localhost, its address, or a name that "
                "ALLOWED_HOSTS lists."
            )

    def _check_origin(self, by_name: Mapping[str, str]) -> None:
        """Refuse requests from pages of other origins.

        The server's only page is its status page; its origin is what Host names.
        """
        origin = by_name.get("origin")
        if origin is None or _netloc(origin) == by_name.get("host", "").lower() or self.origins.allow(origin):
            return
        raise Forbidden(
            "Requests from web pages are not served. If this page is yours, list its origin "
            f"{origin[:100]!r} in ALLOWED_ORIGINS."
        )

    def _check_site(self, by_name: Mapping[str, str]) -> None:
        """Refuse requests for which a browser says that a page of another site has caused them.

        Pages of one host are one site, whatever their ports. On loopback these are the user's own; elsewhere
        they may be anybody's.
        """
        site = by_name.get("sec-fetch-site")
        if site is None or site in _OWN_SITES or self.origins.allow(by_name.get("origin", "")):
            return
        if site == "same-site" and is_loopback(_name_in(by_name.get("host", ""))):
            return
        raise Forbidden(
            "A page of another site has caused this request (Sec-Fetch-Site), and such requests are not "
            "served. If you have followed a link, enter the address yourself."
        )

    def _check_key(self, by_name: Mapping[str, str]) -> None:
        digest = tenant_of_key(key_of(by_name))
        # Compare digests, and all of them, so that the time tells nothing about a key.
        matches = [hmac.compare_digest(digest, tenant_of_key(key)) for key in self.keys]
        if self.keys and not any(matches):
            problem = "This is not a key of this server" if digest else "This server asks for an API key"
            raise Unauthorized(f"{problem}: send it as Authorization: Bearer KEY, or as x-api-key.")


def demand_json(content_type: str | None) -> None:
    """Refuse a body that is not declared as JSON.

    A web page may send a form, plain text or a body without a type to any server without a preflight request.

    Raises:
        UnsupportedMediaType: the Content-Type is not application/json.
    """
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind != "application/json":
        instead = f"not {kind[:80]}" if kind else "and the request has none"
        raise UnsupportedMediaType(f"The Content-Type of a body must be application/json, {instead}.")


def is_chunked(headers: Mapping[str, str]) -> bool:
    """Return whether the body comes in chunks, which tell its length as they come.

    Raises:
        InvalidRequest: Transfer-Encoding names something else.
    """
    coding = headers.get("transfer-encoding")
    if coding is not None and coding.strip(" \t").lower() != "chunked":
        raise InvalidRequest(f"The Transfer-Encoding of a request must be chunked, not {coding[:80]!r}.")
    return coding is not None


def body_length(headers: Mapping[str, str], max_body_bytes: int) -> int | None:
    """Return the length in bytes that a request declares for its body; None if it declares none.

    Args:
        headers: lower-case names to values.

    Raises:
        InvalidRequest: Content-Length is not a whole number, or stands beside Transfer-Encoding: programs on
            the way could not agree on where the request ends.
        BodyTooLarge: the body is longer than the limit.
    """
    if is_chunked(headers) and "content-length" in headers:
        raise InvalidRequest("A request has either Content-Length or Transfer-Encoding.")
    if "content-length" not in headers:
        return None
    text = headers["content-length"].strip()
    if not (text.isascii() and text.isdigit()):
        raise InvalidRequest("Content-Length must be one whole number of bytes.")
    if len(text) > _MAX_LENGTH_DIGITS or int(text) > max_body_bytes:
        raise body_too_large(max_body_bytes)
    return int(text)


def is_loopback(name: str) -> bool:
    """Return whether the name or address can only mean this machine."""
    address = _address(name)
    return name == "localhost" if address is None else address.is_loopback


def _single_values(headers: Iterable[tuple[str, str]]) -> Mapping[str, str]:
    by_name: dict[str, str] = {}
    for name, value in headers:
        lower = name.lower()
        if lower in _ONCE and by_name.setdefault(lower, value.strip()) != value.strip():
            raise InvalidRequest(f"{lower} is given twice, and not the same.")
    return by_name


def _name_in(host: str) -> str:
    """Return the name or address that a Host header gives, without its port; empty if it gives none."""
    match = _HOST.fullmatch(host)
    if match is None:
        return ""
    return match["v6"].lower() if match["v6"] else match["name"].lower().rstrip(".")


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
