"""Name tenants by their API keys. Used by the server and by the proxy's process."""

import hashlib
from collections.abc import Mapping

TENANT_HEADER = "x-start-llm-tenant"
_SIZE = 16


def tenant_of_key(key: str) -> str:
    """Return a digest of an API key, which does not reveal it; empty for no key."""
    return hashlib.blake2b(key.encode(errors="surrogateescape"), digest_size=_SIZE).hexdigest() if key else ""


def key_of(headers: Mapping[str, str]) -> str:
    """Return a request's API key in OpenAI's or Anthropic's form; empty if there is none.

    Args:
        headers: with names in lower case.
    """
    scheme, _, key = headers.get("authorization", "").strip().partition(" ")
    bearer = key.strip() if scheme.lower() == "bearer" else headers.get("authorization", "").strip()
    return bearer or headers.get("x-api-key", "").strip()
