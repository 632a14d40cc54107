"""The endpoints that are open on the proxy's port: some of the server's, and two of LiteLLM's own."""

from start_llm.protocols.routes import ROUTES, Route, RouteTable

_NAME = r"(?!\.)[A-Za-z0-9_+=.-]{1,2000}"
_LITELLMS = tuple(Route("GET", f"/health/{word}", asks_key=False) for word in ("liveliness", "liveness"))
OPEN_ROUTES = RouteTable(
    (*(route for route in ROUTES if route.on_proxy), *_LITELLMS), name=_NAME, names=rf"{_NAME}(?:/{_NAME})?"
)
"""Names are those that a path of LiteLLM can hold without leading anywhere else."""


def is_litellms(route: Route) -> bool:
    """Return whether LiteLLM itself answers an open route."""
    return route in _LITELLMS
