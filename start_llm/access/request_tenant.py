"""Determines whose a request is.

The tenant is a digest of the API key. All requests without a key share one. The proxy sends its own key, and
signs the tenant and the program of each request that it forwards; nobody else is believed.
"""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from start_llm.access.backend_secret import READINESS_HEADER, SIGNATURE_HEADER, BackendSecret, Caller
from start_llm.access.client_name import client_name
from start_llm.access.tenants import key_of, tenant_of_key


@dataclass(frozen=True, slots=True)
class Tenants:
    """Separates tenants.

    Args:
        secret: shared with the proxy; None without a proxy.
        apart: if False, all requests belong to one tenant.
    """

    secret: BackendSecret | None = None
    apart: bool = True

    def caller(self, headers: Mapping[str, str], method: str, path: str) -> Caller:
        """Return who sent a request. What the proxy has not signed is the sender's own: its key and program.

        Args:
            headers: with lower-case names.
            path: of the request; a query behind it does not matter.
        """
        signed = None
        if self.secret and self.is_proxy(headers):
            signed = self.secret.caller(headers, method, path.partition("?")[0])
        return signed or Caller(tenant_of_key(key_of(headers)), client_name(headers))

    def of(self, headers: Mapping[str, str], method: str, path: str) -> bytes:
        """Return the tenant of a request, as `caller` tells it."""
        return self.caller(headers, method, path).tenant.encode() if self.apart else b""

    def is_proxy(self, headers: Mapping[str, str]) -> bool:
        """Return True if the request has the proxy's key.

        Args:
            headers: with lower-case names.
        """
        return self.secret is not None and _equal(
            tenant_of_key(key_of(headers)), tenant_of_key(self.secret.api_key)
        )

    def proof(self, headers: Mapping[str, str], method: str, path: str) -> str:
        """Return what shows the proxy that its signature is believed; empty for requests of anybody else.

        Args:
            headers: with lower-case names.
        """
        if self.secret is None or not self.secret.caller(headers, method, path.partition("?")[0]):
            return ""
        return self.secret.proof(headers[SIGNATURE_HEADER])

    def is_readiness_check(self, headers: Mapping[str, str]) -> bool:
        """Return True if this server sent the request itself, to find out whether the proxy answers.

        Args:
            headers: with lower-case names.
        """
        return self.secret is not None and _equal(headers.get(READINESS_HEADER, ""), self.secret.readiness)


def _equal(given: str, own: str) -> bool:
    return hmac.compare_digest(given.encode(errors="surrogateescape"), own.encode())
