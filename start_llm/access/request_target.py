"""Reads the target of a request: its absolute form, and a path that a client has put together wrongly."""

import re

_ABSOLUTE = re.compile(r"https?://(?P<authority>[^/?#]*)(?P<rest>.*)", re.IGNORECASE | re.DOTALL)
_VERSION, _TWICE = "/v1", "/v1/v1/"
_COMPACT = "/responses/compact"


def origin_form(target: str) -> tuple[str, str | None]:
    """Return the path and query of a target, and the host that its absolute form names, if it has that."""
    match = _ABSOLUTE.fullmatch(target)
    if match is None:
        return target, None
    rest = match["rest"]
    return rest if rest.startswith("/") else f"/{rest}", match["authority"]


def with_one_version(path: str) -> str:
    """Return a path without the `/v1` that a base URL has and its client adds once more."""
    while path.startswith(_TWICE):
        path = path.removeprefix(_VERSION)
    return path


def hint_about(path: str) -> str:
    """Return what helps a client that has found nothing at a path; empty if nothing is known."""
    if path.endswith(_COMPACT):
        return (
            " This server does not compact conversations. Codex does so itself if its provider has another "
            "name than OpenAI: set model_providers.ID.name in its configuration."
        )
    if with_one_version(path) == path:
        return ""
    return " The base URL of this client ends in /v1, and the client adds that itself: leave /v1 out of it."
