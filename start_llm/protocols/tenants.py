"""Whose request it is, from the key that came with it.

Whoever sends no key belongs to one tenant with all who send none. The proxy sends its own key, and tells
whose request it passes on; nobody else can.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from start_llm.core.tenants import TENANT_HEADER, key_of, tenant_of_key


@dataclass(frozen=True, slots=True)
class Tenants:
    """Tells tenants apart.

    Args:
        proxy_key: that of the proxy, which is believed what it says of others; empty: there is none.
        apart: if not, all belong to one.
    """

    proxy_key: str = ""
    apart: bool = True

    def of(self, headers: Mapping[str, str]) -> bytes:
        """The tenant of a request.

        Args:
            headers: with names in lower case.
        """
        if not self.apart:
            return b""
        if self.is_proxy(headers):
            return headers.get(TENANT_HEADER, "").encode()
        return tenant_of_key(key_of(headers)).encode()

    def is_proxy(self, headers: Mapping[str, str]) -> bool:
        """Whether the proxy passes this request on.

        Args:
            headers: with names in lower case.
        """
        sent, own = tenant_of_key(key_of(headers)), tenant_of_key(self.proxy_key)
        return bool(self.proxy_key) and hmac.compare_digest(sent, own)
