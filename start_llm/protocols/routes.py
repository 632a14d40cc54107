"""The table of endpoints: the server and the proxy find them by it, and docs/api.md repeats it.

GET and HEAD never load or evict a model, ask anybody or write, but for when a stored response was last used:
a web page can send them without an Origin.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from start_llm.access.request_target import hint_about
from start_llm.core.errors import MethodNotAllowed, NotFound

READING = ("GET", "HEAD")
_PLACEHOLDER = re.compile(r"\{id(?P<many>:path)?\}")
_WHERE_THEY_ARE = " docs/api.md lists the endpoints; most begin with /v1."
_LONGEST_MEANT, _LIKENESS, _LONGEST_SHOWN = 100, 0.75, 200

type BodyKind = Literal["chat", "text", "messages", "responses", "embeddings", "other"]


@dataclass(frozen=True, slots=True)
class Route:
    """An endpoint: a method and a path.

    Attributes:
        method: an endpoint for GET also answers HEAD.
        path: a template. `{id}` stands for a name, `{id:path}` for one that may contain slashes.
        body: which fields its JSON body has; None: it has no body, and its fields are in the query.
        aliases: other paths of it, for clients whose base URL lacks `/v1`.
        asks_key: False: it needs no key. Health checks may have none, and it reveals nothing else.
        on_proxy: it is open on the proxy's port too.
        explained_by: another path of the server, which reports how much of the same body's prompt is cached.
    """

    method: str
    path: str
    body: BodyKind | None = None
    aliases: tuple[str, ...] = ()
    asks_key: bool = True
    on_proxy: bool = False
    explained_by: str | None = None

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def methods(self) -> tuple[str, ...]:
        return READING if self.method == "GET" else (self.method,)

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path, *self.aliases)


ROUTES = (
    Route(
        "POST",
        "/v1/chat/completions",
        "chat",
        ("/chat/completions",),
        on_proxy=True,
        explained_by="/v1/cache/explain",
    ),
    Route("POST", "/v1/completions", "text", ("/completions",), on_proxy=True),
    Route(
        "POST",
        "/v1/messages",
        "messages",
        on_proxy=True,
        explained_by="/v1/cache/explain/messages",
    ),
    Route("POST", "/v1/messages/count_tokens", "messages", on_proxy=True),
    Route(
        "POST",
        "/v1/responses",
        "responses",
        ("/responses",),
        on_proxy=True,
        explained_by="/v1/cache/explain/responses",
    ),
    Route("POST", "/v1/responses/input_tokens", "responses", ("/responses/input_tokens",), on_proxy=True),
    Route("GET", "/v1/responses/{id}", aliases=("/responses/{id}",), on_proxy=True),
    Route("DELETE", "/v1/responses/{id}", aliases=("/responses/{id}",), on_proxy=True),
    Route("GET", "/v1/responses/{id}/input_items", aliases=("/responses/{id}/input_items",), on_proxy=True),
    Route("GET", "/v1/models", aliases=("/models",), on_proxy=True),
    Route("POST", "/v1/models/{id:path}/load"),
    Route("POST", "/v1/models/{id:path}/unload"),
    Route("GET", "/v1/models/{id:path}", on_proxy=True),
    Route("GET", "/v1/adapters"),
    Route("POST", "/v1/adapters", "other"),
    Route("DELETE", "/v1/adapters/{id}"),
    Route("POST", "/v1/embeddings", "embeddings", ("/embeddings",), on_proxy=True),
    Route("POST", "/tokenize", "chat"),
    Route("POST", "/detokenize", "other"),
    Route("GET", "/health", asks_key=False, on_proxy=True),
    Route("GET", "/stats", on_proxy=True),
    Route("GET", "/metrics", on_proxy=True),
    Route("GET", "/", asks_key=False, on_proxy=True),
    Route("GET", "/api/hello", asks_key=False, on_proxy=True),
    Route("GET", "/activity"),
    Route("GET", "/activity/{id}"),
    Route("GET", "/library"),
    Route("GET", "/fit"),
    Route("POST", "/fit", "other"),
    Route("GET", "/downloads"),
    Route("POST", "/downloads", "other"),
    Route("POST", "/downloads/{id}/pause"),
    Route("POST", "/downloads/{id}/resume"),
    Route("DELETE", "/downloads/{id}"),
    Route("POST", "/v1/cache/warm", "other", on_proxy=True),
    Route("POST", "/v1/cache/explain", "chat"),
    Route("POST", "/v1/cache/explain/messages", "messages"),
    Route("POST", "/v1/cache/explain/responses", "responses"),
)
"""Of templates that match the same path, the first one counts."""


@dataclass(frozen=True, slots=True)
class RouteMatch:
    """The endpoint of a request line.

    Attributes:
        template: which of the endpoint's paths it is.
        name: what stands for `{id}`, as it was sent; empty if there is no such place.
    """

    route: Route
    template: str
    name: str

    def path(self, name: str) -> str:
        """Return the path with another name in the place of `{id}`."""
        return _PLACEHOLDER.sub(lambda _: name, self.template)


class RouteTable:
    """Finds the endpoints of paths. A slash at the end of a path does not matter.

    Args:
        name: pattern of what `{id}` stands for.
        names: pattern of what `{id:path}` stands for.
    """

    def __init__(self, routes: Iterable[Route], *, name: str = "[^/]+", names: str = ".+") -> None:
        self._routes: dict[str, dict[str, Route]] = {}
        for route in routes:
            for path in route.paths:
                self._routes.setdefault(path, {}).update(dict.fromkeys(route.methods, route))
        self._patterns = {path: _pattern(path, name, names) for path in self._routes if "{" in path}

    def template(self, path: str) -> str | None:
        """Return the template of a path, None if no endpoint has it."""
        path = _without_slash(path)
        if path in self._routes and path not in self._patterns:
            return path
        return next((known for known, pattern in self._patterns.items() if pattern.fullmatch(path)), None)

    def asks_key(self, path: str) -> bool:
        """Return whether requests of this path need a key. Those of unknown paths do."""
        template = self.template(path)
        return template is None or any(route.asks_key for route in self._routes[template].values())

    def find(self, method: str, path: str) -> RouteMatch:
        """Return the endpoint of a request line.

        Raises:
            NotFound: no such path.
            MethodNotAllowed: the path exists, but not for this method.
        """
        path = _without_slash(path)
        template, hint = self.template(path), hint_about(path)
        if template is None or hint:
            raise NotFound(f"There is nothing at {path[:_LONGEST_SHOWN]}.{hint or self._meant(path)}")
        routes = self._routes[template]
        if method not in routes:
            message = f"{path[:_LONGEST_SHOWN]} answers {' and '.join(routes)}, not {method}."
            raise MethodNotAllowed(message, allowed=tuple(routes))
        match = self._patterns[template].fullmatch(path) if template in self._patterns else None
        return RouteMatch(routes[method], template, match[1] if match else "")

    def _meant(self, path: str) -> str:
        """Return which endpoint was meant, most likely; of an unlike path where they are listed."""
        candidates = [known_path for known_path in self._routes if known_path not in self._patterns]
        longer = [known_path for known_path in candidates if known_path.startswith(f"{path}/")]
        meant = longer or get_close_matches(path[:_LONGEST_MEANT], candidates, n=1, cutoff=_LIKENESS)
        return f" Did you mean {meant[0]}?" if meant else _WHERE_THEY_ARE


def shown(template: str) -> str:
    """Return a template as documents and metrics write it."""
    return template.replace(":path", "")


def _without_slash(path: str) -> str:
    return path.rstrip("/") or "/"


def _pattern(template: str, name: str, names: str) -> re.Pattern[str]:
    before, many, after = _PLACEHOLDER.split(template)
    return re.compile(f"{re.escape(before)}({names if many else name}){re.escape(after)}", re.DOTALL)
