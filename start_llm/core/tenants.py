"""How tenants are named. Read by the server, and by the guard inside the proxy's process."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

TENANT_HEADER = "x-start-llm-tenant"
_SIZE = 16


def tenant_of_key(key: str) -> str:
    """Names an API key without telling it; empty for none."""
    return hashlib.blake2b(key.encode(errors="surrogateescape"), digest_size=_SIZE).hexdigest() if key else ""


def key_of(headers: Mapping[str, str]) -> str:
    """The API key of a request, as clients of either maker send it; empty if there is none.

    Args:
        headers: with names in lower case.
    """
    scheme, _, key = headers.get("authorization", "").strip().partition(" ")
    bearer = key.strip() if scheme.lower() == "bearer" else headers.get("authorization", "").strip()
    return bearer or headers.get("x-api-key", "").strip()
