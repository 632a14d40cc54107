"""Put the applications around LiteLLM together, from what the proxy's environment says.

Importing this imports LiteLLM, which takes seconds.
"""

import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from litellm.proxy.proxy_server import app

from start_llm.access.access_policy import AccessPolicy
from start_llm.access.backend_secret import BackendSecret
from start_llm.access.cross_origin import AllowedOrigins
from start_llm.proxy.asgi import Application, Receive, Send
from start_llm.proxy.backend import Backend
from start_llm.proxy.bodies import Bodies
from start_llm.proxy.config import BODY_S, api_base
from start_llm.proxy.forward import Forward
from start_llm.proxy.litellm_router import LiteLLMRouter
from start_llm.proxy.proxy_access import ProxyAccessPolicy
from start_llm.proxy.refusals import tell_server
from start_llm.proxy.server_group import ServerGroup
from start_llm.proxy.to_status_page import ToStatusPage


def application() -> Application:
    """Return LiteLLM with everything around it, from the inside out."""
    # LiteLLM can look up any variable of its environment.
    secret = BackendSecret(os.environ.pop("START_LLM_BACKEND_SECRET"))
    backends = [Backend(url, secret) for url in _listed("START_LLM_BACKENDS")]
    router = LiteLLMRouter({api_base(backend.url): backend for backend in backends})
    forward = ToStatusPage(Forward(app, router.find_server), backends[0].url)
    routed = forward if len(backends) == 1 else _among_servers(forward, backends)
    most_bytes = int(os.environ["START_LLM_PROXY_MOST_BYTES"])
    return _with_access_policy(
        Connected(Bodies(routed, most_bytes, float(os.environ[BODY_S])), backends), secret, most_bytes
    )


class Connected:
    """ASGI middleware that keeps the clients of the servers open while the application runs."""

    def __init__(self, inside: Application, backends: Sequence[Backend]) -> None:
        self._inside = inside
        self._backends = backends

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as stack:
            if scope["type"] == "lifespan":
                for backend in self._backends:
                    await stack.enter_async_context(backend.connected())
            await self._inside(scope, receive, send)


def _among_servers(forward: Application, backends: Sequence[Backend]) -> Application:
    """Return what sends each request to one of several servers."""
    # The interpreter of PROXY_PYTHON may lack prometheus_client, which one server does not need.
    from start_llm.proxy.routing import Routing  # noqa: PLC0415

    return Routing(forward, ServerGroup(backends, tell_server))


def _with_access_policy(inside: Application, secret: BackendSecret, most_bytes: int) -> ProxyAccessPolicy:
    keys, hosts, origins = (_listed(f"START_LLM_PROXY_{name}") for name in ("KEYS", "HOSTS", "ORIGINS"))
    names = frozenset(name.lower() for name in hosts)
    access_policy = AccessPolicy(keys, names, AllowedOrigins(origins))
    return ProxyAccessPolicy(inside, access_policy, secret, most_bytes)


def _listed(name: str) -> tuple[str, ...]:
    return tuple(filter(None, os.environ[name].split(",")))
