"""Name the fields that steer LiteLLM: where it sends a request, with which headers and how often.

`litellm_names` imports LiteLLM, which takes seconds.
"""

import inspect
import re

_PRIVATE = re.compile(r"(?:x-)?litellm[-_].*", re.IGNORECASE)
# What LiteLLM takes out of bodies, besides the names in its own tables.
_OTHERS = frozenset(
    """
    additional_drop_params agentcore_runtime_session_id allowed_openai_params api_type args
    attempted_fallbacks aws_workspace_id base_url budget_limits cache_control_injection_points
    config_file_path context_window_fallbacks default_headers deployment_id deployment_url disable_fallbacks
    extra_headers
    extra_query guardrail_config include_fallback_errors include_guardrail_response kwargs
    mock_testing_content_policy_fallbacks mock_testing_context_fallbacks mock_testing_fallbacks
    mock_testing_rate_limit_error organization_id original_model_group passthrough_on_no_deployment policies
    priority router_settings_override sagemaker_base_url slack_webhook_url specific_deployment
    standard_logging_object use_ssl user_api_key_auth_metadata user_config
    """.split()
)


def litellm_names() -> frozenset[str]:
    """Return the fields by which LiteLLM can be steered, as the installed LiteLLM names them.

    Some it forbids itself, in `metadata` too: a request with one of them is an error of its own, a 500.
    """
    from litellm.proxy.auth import auth_utils  # noqa: PLC0415
    from litellm.router import Router  # noqa: PLC0415
    from litellm.types.router import GenericLiteLLMParams  # noqa: PLC0415
    from litellm.types.utils import all_litellm_params  # noqa: PLC0415

    forbidden = auth_utils._SECRET_RESOLVING_PARAMS  # pyright: ignore[reportPrivateUsage]
    of_calls = (*all_litellm_params, *GenericLiteLLMParams.model_fields, *forbidden)
    return frozenset((*of_calls, *inspect.signature(Router).parameters)) | _OTHERS


def is_litellms_own(name: str) -> bool:
    """Return True for a field or header that LiteLLM has named after itself."""
    return _PRIVATE.fullmatch(name) is not None
