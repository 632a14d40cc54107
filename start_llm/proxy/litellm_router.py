"""Let LiteLLM's router take the server that was chosen for a request. LiteLLM loads this by name.

Its own ways of choosing are not enough here. Session affinity knows ids in headers alone, and goes back to a
server that was restarted and has nothing any more; the check for prompt caching needs 1,024 tokens and a mark
of the client; its health checks generate replies, and its cool-downs begin with a request that has failed.
"""

from typing import Any, override

from litellm.integrations.custom_logger import CustomLogger

from start_llm.proxy.chosen_server import chosen_api_base


class ChosenDeployment(CustomLogger):
    """Leaves of a model's deployments the one at the chosen server."""

    @override
    async def async_filter_deployments(
        self, model: str, healthy_deployments: list[Any], messages: Any, *_: Any, **__: Any
    ) -> list[Any]:
        address = chosen_api_base()
        return [one for one in healthy_deployments if one["litellm_params"]["api_base"] == address]


chosen_deployment = ChosenDeployment()
