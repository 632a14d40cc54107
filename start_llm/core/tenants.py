"""How tenants are named. Read by the server, and by the guard inside the proxy's process."""

from __future__ import annotations

import hashlib

TENANT_HEADER = "x-start-llm-tenant"
_SIZE = 16


def tenant_of_key(key: str) -> str:
    """Names an API key without telling it; empty for none."""
    return hashlib.blake2b(key.encode(errors="surrogateescape"), digest_size=_SIZE).hexdigest() if key else ""
