"""Who may use the proxy. Runs inside LiteLLM, which calls it for every request."""

from __future__ import annotations

import hmac
import os
from typing import Any
from urllib.parse import urlsplit

import litellm
import litellm.router
from litellm.litellm_core_utils.fallback_generalizations import set_fallback_generalizations
from litellm.proxy._types import LitellmUserRoles, ProxyException, UserAPIKeyAuth
from litellm.responses.streaming_iterator import ResponsesAPIStreamingIterator

from start_llm.core.tenants import TENANT_HEADER, tenant_of_key

_PORT = os.environ["START_LLM_PROXY_PORT"]
_KEY = os.environ["START_LLM_PROXY_KEY"]
_OWN_NAMES = frozenset(f"{name}:{_PORT}" for name in ("127.0.0.1", "localhost", "[::1]"))

# One model answers to every name. What LiteLLM knows of the models of others would make it drop or rewrite
# `thinking` and `output_config`, by the name that the client uses (lesson 29).
_CAPABILITIES = {
    "litellm_provider": "anthropic",
    "mode": "chat",
    "supports_reasoning": True,
    "supports_adaptive_thinking": True,
    "supports_legacy_thinking": True,
    "supports_function_calling": True,
    "supports_vision": True,
    "input_cost_per_token": 0,
    "output_cost_per_token": 0,
}
litellm.model_cost.clear()
set_fallback_generalizations([{"name": "any", "pattern": ".*", "model_info": dict(_CAPABILITIES)}])

# LiteLLM holds back the signs of life of a response until there is something to read, in case another model
# is to answer instead. There is none, and clients give up after five minutes of silence (lesson 37).
litellm.router.MAX_HELD_PRE_OUTPUT_RESPONSES_EVENTS = 0  # pyright: ignore[reportConstantRedefinition]


async def _hang_up(stream: Any) -> None:
    await stream.response.aclose()


# LiteLLM closes the stream of a client that is gone if the stream can be closed; that of a response cannot,
# and was read, and computed, to its end (lesson 38).
setattr(ResponsesAPIStreamingIterator, "aclose", _hang_up)  # noqa: B010 - it has no such attribute


async def user_api_key_auth(request: Any, api_key: str | None) -> UserAPIKeyAuth:
    """Let a request in.

    Raises:
        ProxyException: 403 for a web page or a foreign host name, 401 for a wrong key.
    """
    if request.headers.get("host", "") not in _OWN_NAMES:
        raise _refusal("This Host is not served here.", 403)
    origin = request.headers.get("origin")
    if origin and urlsplit(origin).netloc not in _OWN_NAMES:
        raise _refusal("Requests from web pages are not served.", 403)
    key = (api_key or "").removeprefix("Bearer ")
    if _KEY and not hmac.compare_digest(key.encode(), _KEY.encode()):
        raise _refusal("Wrong API key.", 401)
    _tell_tenant(request, key)
    return UserAPIKeyAuth(api_key="local", user_id="local", user_role=LitellmUserRoles.INTERNAL_USER)


def _tell_tenant(request: Any, key: str) -> None:
    """Whose request it is, in a header that LiteLLM passes on; what the client says of that is dropped."""
    name = TENANT_HEADER.encode()
    headers: list[tuple[bytes, bytes]] = request.scope["headers"]
    # In place: LiteLLM has read the list already, and reads it again.
    headers[:] = [*(one for one in headers if one[0].lower() != name), (name, tenant_of_key(key).encode())]


def _refusal(message: str, status: int) -> ProxyException:
    kind = "authentication_error" if status == 401 else "permission_error"
    return ProxyException(message=message, type=kind, param=None, code=status)
