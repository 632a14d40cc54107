"""Determines the tenant of a request from its key.

All requests without a key share one tenant. The proxy sends its own key and names the tenant of each request
that it forwards; no other client can name a tenant.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from start_llm.core.tenants import TENANT_HEADER, WARM_UP_HEADER, key_of, tenant_of_key


@dataclass(frozen=True, slots=True)
class Tenants:
    """Separates tenants.

    Args:
        proxy_key: key of the proxy, which may name tenants; empty without a proxy.
        apart: if False, all requests belong to one tenant.
    """

    proxy_key: str = ""
    apart: bool = True

    def of(self, headers: Mapping[str, str]) -> bytes:
        """Return the tenant of a request.

        Args:
            headers: with lower-case names.
        """
        if not self.apart:
            return b""
        if self.is_proxy(headers):
            return headers.get(TENANT_HEADER, "").encode()
        return tenant_of_key(key_of(headers)).encode()

    def is_proxy(self, headers: Mapping[str, str]) -> bool:
        """Return True if the proxy forwarded this request.

        Args:
            headers: with lower-case names.
        """
        return self._is_proxy_key(key_of(headers))

    def is_warm_up(self, headers: Mapping[str, str]) -> bool:
        """Return True if this server sent the request itself, to find out whether the proxy answers.

        Args:
            headers: with lower-case names.
        """
        return self._is_proxy_key(headers.get(WARM_UP_HEADER, ""))

    def _is_proxy_key(self, key: str) -> bool:
        sent, own = tenant_of_key(key), tenant_of_key(self.proxy_key)
        return bool(self.proxy_key) and hmac.compare_digest(sent, own)
