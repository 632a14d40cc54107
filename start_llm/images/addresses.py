"""Decides which addresses an image may be fetched from: those of the public internet alone.

A client must not use the server to reach what only the server can reach. A name is resolved once, all of its
addresses must be public, and the connection goes to one of them, so that a second answer of the DNS changes
nothing.
"""

import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from start_llm.images.problems import is_bad_address

type Resolve = Callable[[str, int], Sequence[str]]
"""Returns the addresses of a host. Raises OSError."""

_PORTS = {"http": 80, "https": 443}
_LEAST_PORT = 1024
"""Below it other services listen, which might take a request for one of theirs."""
_LONGEST_URL = 8192
_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(\.(?!-)[a-z0-9_-]{1,63}(?<!-))*\.?", re.IGNORECASE)
_NUMBER = re.compile(r"(0x[0-9a-f]*|[0-9]+)\.?", re.IGNORECASE)
_LOCAL = (".localhost", ".local", ".internal", ".localdomain")
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
_WITH_OTHERS_INSIDE = ("2001::/32", "2002::/16", "64:ff9b::/96", "64:ff9b:1::/48")
_DOCUMENTATION = "3fff::/20"
_REFUSED = tuple(map(ipaddress.ip_network, (*_WITH_OTHERS_INSIDE, _DOCUMENTATION)))


@dataclass(frozen=True, slots=True)
class ImageAddress:
    """The parts of a URL that may be asked for.

    Attributes:
        host: a name or a public address.
        target: path and query.
    """

    is_secure: bool
    host: str
    port: int
    target: str


def parse_address(url: str) -> ImageAddress:
    """Take a URL apart.

    Raises:
        ImageProblem: it is no http(s) URL, holds a user name, or names this machine or its network.
    """
    if len(url) > _LONGEST_URL or not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise is_bad_address("it must be at most 8192 ASCII characters without spaces")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise is_bad_address(str(error)) from error
    if parts.scheme not in _PORTS:
        raise is_bad_address("it must begin with https://, http:// or data:")
    if "@" in parts.netloc:
        raise is_bad_address("it must not hold a user name or a password")
    port = _PORTS[parts.scheme] if port is None else port
    if port not in _PORTS.values() and port < _LEAST_PORT:
        raise is_bad_address(f"port {port} is not one of web servers")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return ImageAddress(parts.scheme == "https", _checked_host(parts.hostname or ""), port, target)


def _checked_host(host: str) -> str:
    if ":" in host or _last_label_is_number(host):
        if not is_public(host):
            raise is_bad_address(f"{host} is not a public address")
        return host
    name = host.rstrip(".").lower()
    if not _NAME.fullmatch(host) or len(host) > 253:
        raise is_bad_address("it names no host")
    if "." not in name or name.endswith(_LOCAL):
        raise is_bad_address(f"{host} is not a public name")
    return host


def _last_label_is_number(host: str) -> bool:
    """Return whether resolvers may take a host for an address: decimal, octal, hexadecimal, or shortened."""
    return bool(_NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2] or host))


def is_public(text: str) -> bool:
    """Return whether a text is an address on the public internet, in its usual spelling."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if address.is_multicast or address.is_reserved or not address.is_global:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return True
    is_plain = not address.scope_id and not any(address in network for network in _REFUSED)
    return is_plain and address in _GLOBAL_UNICAST


def resolve(host: str, port: int) -> Sequence[str]:
    """Ask the system's resolver."""
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return tuple(dict.fromkeys(str(place[0]) for *_, place in entries))
