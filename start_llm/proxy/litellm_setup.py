"""Set up LiteLLM from inside its process: one user, one model, and five of its defaults changed."""

import sys
from typing import Any

import litellm
import litellm.router
from litellm.litellm_core_utils.fallback_generalizations import set_fallback_generalizations
from litellm.llms.anthropic.pass_through.messages.utils import anthropic_messages_optional_param_keys
from litellm.proxy._types import LitellmUserRoles, UserAPIKeyAuth
from litellm.responses.streaming_iterator import ResponsesAPIStreamingIterator
from litellm.types.llms.anthropic import AnthropicMessagesRequestOptionalParams

from start_llm.protocols.known_fields import KNOWN_FIELDS

# Every model name reaches the same model. LiteLLM's table of known models would make it drop or rewrite
# `thinking` and `output_config`, depending on the name that the client sends (lesson 29).
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

# Of /v1/messages LiteLLM passes on the fields of this record, and drops others, such as `diagnostics`, in
# silence (lesson 344). All that get here are known to the server. It may have read the record already.
_ALREADY_PARAMETERS = frozenset({"messages", "model"})
AnthropicMessagesRequestOptionalParams.__annotations__.update(
    dict.fromkeys(KNOWN_FIELDS["messages"].names - _ALREADY_PARAMETERS, Any)
)
anthropic_messages_optional_param_keys.cache_clear()

# LiteLLM holds back a response's first events until there is output, so that it could still switch to another
# model. There is no other model, and clients give up after five minutes of silence (lesson 37).
litellm.router.MAX_HELD_PRE_OUTPUT_RESPONSES_EVENTS = 0  # pyright: ignore[reportConstantRedefinition]

# For each request it imports a module that needs OpenTelemetry, which is not installed (lesson 330).
sys.modules.setdefault("litellm.integrations.otel.logger", None)  # pyright: ignore[reportArgumentType]


async def _hang_up(stream: Any) -> None:
    await stream.response.aclose()


# When a client disconnects, LiteLLM closes the stream if the stream has `aclose`. The stream of the Responses
# protocol has none, so the reply was computed to its end (lesson 38).
setattr(ResponsesAPIStreamingIterator, "aclose", _hang_up)  # noqa: B010 - it has no such attribute


async def user_api_key_auth(request: Any, api_key: str | None) -> UserAPIKeyAuth:  # noqa: ARG001
    """Accept every caller: `proxy.proxy_access` has already checked the key."""
    return UserAPIKeyAuth(api_key="local", user_id="local", user_role=LitellmUserRoles.INTERNAL_USER)
