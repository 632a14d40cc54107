"""The paths of the server's endpoints, read from the table."""

from __future__ import annotations

from start_llm.protocols.routes import ROUTES


def with_name(template: str, name: str) -> str:
    """The path of an endpoint, with this name where its template has a place for one."""
    return template.replace("{id}", name).replace("{id:path}", name)


def _fixed(method: str) -> list[str]:
    paths = (path for route in ROUTES if route.method == method for path in route.paths)
    return [path for path in paths if with_name(path, "") == path]


GET_PATHS, POST_PATHS = _fixed("GET"), _fixed("POST")
NAMED_ROUTES = [
    (route.method, path) for route in ROUTES for path in route.paths if with_name(path, "") != path
]
"""Methods and templates of the endpoints that have a name in their path."""
