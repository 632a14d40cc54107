"""What LiteLLM is told of users and of the model. It runs inside of LiteLLM."""

from __future__ import annotations

import os
from typing import Any

import litellm
from litellm.proxy._types import LitellmUserRoles, UserAPIKeyAuth

_MODEL = os.environ["START_LLM_PROXY_MODEL"]

# Without this, LiteLLM drops or rewrites `thinking` of a model that it does not know.
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
litellm.register_model({name: dict(_CAPABILITIES) for name in (_MODEL, f"anthropic/{_MODEL}")})


async def user_api_key_auth(request: Any, api_key: str | None) -> UserAPIKeyAuth:  # noqa: ARG001
    """Everybody is let in: who came as far as this has passed the door (`proxy.door`)."""
    return UserAPIKeyAuth(api_key="local", user_id="local", user_role=LitellmUserRoles.INTERNAL_USER)
