"""Put the applications around LiteLLM together, from what the proxy's environment says.

Importing this imports LiteLLM, which takes seconds.
"""

import os
from collections.abc import Sequence

from litellm.proxy.proxy_server import app

from start_llm.access.access_policy import AccessPolicy
from start_llm.access.backend_secret import BackendSecret
from start_llm.access.cross_origin import AllowedOrigins
from start_llm.protocols.notices import Notices
from start_llm.proxy.backend import Backend
from start_llm.proxy.chosen_server import ChosenBackend
from start_llm.proxy.control_fields import litellm_names
from start_llm.proxy.direct import Direct
from start_llm.proxy.error_text import Application, ErrorRewriter
from start_llm.proxy.own_bodies import DefaultName, OwnBodies
from start_llm.proxy.proxy_access import ProxyAccessPolicy
from start_llm.proxy.refusals import shorten_refusals, tell_server
from start_llm.proxy.relay import Relay, watch_replies
from start_llm.proxy.server_group import ServerGroup
from start_llm.proxy.to_status_page import ToStatusPage


def application() -> ProxyAccessPolicy:
    """Return LiteLLM with everything around it, from the inside out."""
    # LiteLLM can look up any variable of its environment.
    secret = BackendSecret(os.environ.pop("START_LLM_BACKEND_SECRET"))
    backends = [Backend(url, secret) for url in _listed("START_LLM_BACKENDS")]
    shorten_refusals()
    watch_replies()
    connect = _to_one_server if len(backends) == 1 else _to_several_servers
    inside, default_name = connect(backends)
    bodies = OwnBodies(
        inside,
        control=litellm_names(),
        max_body_bytes=int(os.environ["START_LLM_PROXY_MOST_BYTES"]),
        default_name=default_name,
        tell=Notices(tell_server).tell,
    )
    return _with_access_policy(bodies, secret)


def _to_one_server(backends: Sequence[Backend]) -> tuple[Application, DefaultName]:
    """Return what sends requests to the only server, and what names its default model."""
    (backend,) = backends
    return _beside_litellm(backend, backend.url), backend.default_model


def _to_several_servers(backends: Sequence[Backend]) -> tuple[Application, DefaultName]:
    """Return what sends each request to one of the servers, and what names their default model."""
    # The interpreter of PROXY_PYTHON may lack prometheus_client, which one server does not need.
    from start_llm.proxy.routing import Routing  # noqa: PLC0415

    group = ServerGroup(backends, tell_server)
    return Routing(_beside_litellm(ChosenBackend(), backends[0].url), group), group.default_model


def _beside_litellm(backend: Backend | ChosenBackend, page_url: str) -> Application:
    """Return LiteLLM with the server's own words for its errors, and what passes beside it."""
    litellm = ErrorRewriter(Relay(app), backend)
    return ToStatusPage(Direct(litellm, backend), page_url)


def _with_access_policy(inside: Application, secret: BackendSecret) -> ProxyAccessPolicy:
    keys, hosts, origins = (_listed(f"START_LLM_PROXY_{name}") for name in ("KEYS", "HOSTS", "ORIGINS"))
    names = frozenset(name.lower() for name in hosts)
    access_policy = AccessPolicy(keys, names, AllowedOrigins(origins))
    return ProxyAccessPolicy(inside, access_policy, secret, int(os.environ["START_LLM_PROXY_MOST_BYTES"]))


def _listed(name: str) -> tuple[str, ...]:
    return tuple(filter(None, os.environ[name].split(",")))
