"""What LiteLLM is told of users and of the model. It runs inside of LiteLLM."""

from __future__ import annotations

from typing import Any

import litellm
import litellm.router
from litellm.litellm_core_utils.fallback_generalizations import set_fallback_generalizations
from litellm.proxy._types import LitellmUserRoles, UserAPIKeyAuth
from litellm.responses.streaming_iterator import ResponsesAPIStreamingIterator

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


async def user_api_key_auth(request: Any, api_key: str | None) -> UserAPIKeyAuth:  # noqa: ARG001
    """Everybody is let in: who came as far as this has passed the door (`proxy.door`)."""
    return UserAPIKeyAuth(api_key="local", user_id="local", user_role=LitellmUserRoles.INTERNAL_USER)
