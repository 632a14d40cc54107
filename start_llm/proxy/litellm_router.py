"""Let LiteLLM's router find the server of a request. LiteLLM loads `chosen_deployment` by name.

With several servers `proxy.routing` chooses, and the router takes that one. Its own ways of choosing are not
enough here. Session affinity knows ids in headers alone, and goes back to a server that was restarted and has
nothing any more; the check for prompt caching needs 1,024 tokens and a mark of the client; its health checks
generate replies, and its cool-downs begin with a request that has failed.
"""

from collections.abc import Mapping
from typing import Any, override

from litellm.integrations.custom_logger import CustomLogger
from litellm.proxy import proxy_server

from start_llm.proxy.backend import Backend
from start_llm.proxy.bodies import Body
from start_llm.proxy.chosen_server import chosen_api_base

_ANY = "*"


class ChosenDeployment(CustomLogger):
    """Leaves of a model's deployments the one at the chosen server."""

    @override
    async def async_filter_deployments(
        self, model: str, healthy_deployments: list[Any], messages: Any, *_: Any, **__: Any
    ) -> list[Any]:
        address = chosen_api_base()
        return [entry for entry in healthy_deployments if entry["litellm_params"]["api_base"] == address]


chosen_deployment = ChosenDeployment()


class LiteLLMRouter:
    """Finds servers by LiteLLM's router, which has started once the application's lifespan has.

    Args:
        servers: by their addresses in LiteLLM's configuration.
    """

    def __init__(self, servers: Mapping[str, Backend]) -> None:
        self._servers = servers

    async def find_server(self, body: Body) -> Backend:
        """Return the server for the model that a request names, or for any."""
        router: Any = proxy_server.llm_router
        chosen = await router.async_get_available_deployment(model=_name(body), request_kwargs={})
        return self._servers[chosen["litellm_params"]["api_base"]]


def _name(body: Body) -> str:
    """Return the name of a model as the router can match it: its wildcard holds no line break."""
    return body.model if body.model and body.model.isprintable() else _ANY
