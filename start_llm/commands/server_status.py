"""`start_llm status`: which servers run, and what they do."""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

from start_llm.config.settings import Settings
from start_llm.core.columns import binary_size
from start_llm.core.errors import LaunchError
from start_llm.launch.http_requests import NO_KEY, ask
from start_llm.launch.server_info import own_url, servers_of
from start_llm.storage.running_servers import RunningServer

NOT_RUNNING = 3
"""Exit status if there is no server, as `systemctl status` has it."""
_PATIENCE_S = 5.0
_HEALTH = (200, 503)
"""Statuses of `/health`: it serves, or it does not now."""
_LOADING = "loading"
_SILENT = "gives no answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """What a server tells of itself.

    Attributes:
        pid: None for a server that is known by its address alone.
        state: loading, what `/health` says (ok, loading, draining, stuck, failed), or why nothing is known.
        model: the one that answers by default.
        other_models: the other loaded ones.
        memory, requests, tokens: counts by name; empty if nothing is known.
    """

    url: str
    state: str
    pid: int | None = None
    proxy_url: str | None = None
    version: str | None = None
    started_at: float | None = None
    model: str | None = None
    other_models: tuple[str, ...] = ()
    memory: Mapping[str, int] = field(default_factory=dict)
    requests: Mapping[str, int] = field(default_factory=dict)
    tokens: Mapping[str, int] = field(default_factory=dict)


def tell_status(settings: Settings, *, as_json: bool, stream: TextIO) -> int:
    """Print the state of this user's servers. Return 0 if there is one, else 3.

    If none has written a file for us, the address is asked that the settings name.
    """
    key = next(iter(settings.access.keys), NO_KEY)
    url = own_url(settings.server.host, settings.server.port)
    statuses = [_status_of(server, key) for server in servers_of(settings)] or list(_status_at(url, key))
    if as_json:
        servers = [asdict(status) for status in statuses]
        stream.write(json.dumps({"running": bool(statuses), "servers": servers}, indent=2) + "\n")
    elif statuses:
        stream.write("\n\n".join("\n".join(_lines(status)) for status in statuses) + "\n")
    else:
        stream.write(f"No server is running, and none answers at {url}.\n")
    return 0 if statuses else NOT_RUNNING


def _status_of(server: RunningServer, key: str) -> ServerStatus:
    state, counts = (_LOADING, {}) if server.is_loading else _asked(server.url, key)
    known = asdict(server)
    del known["is_loading"]
    return ServerStatus(state=state, **known, **counts)


def _status_at(url: str, key: str) -> Iterator[ServerStatus]:
    """Yield the state of a server that has written no file for us; nothing if none answers."""
    state, counts = _asked(url, key)
    if counts:
        yield ServerStatus(url=url, state=state, **counts)


def _asked(url: str, key: str) -> tuple[str, Mapping[str, Any]]:
    """Return the state of a server and its counts; none if it does not answer as our servers do."""
    try:
        health, stats = (ask(f"{url}/{page}", key, _PATIENCE_S) for page in ("health", "stats"))
        if health is None or stats is None:
            return _SILENT, {}
        if stats.status == 401:
            asks = "asks for a key: set MLX_API_KEY to one of its keys"
            return asks if key == NO_KEY else "does not take the key of MLX_API_KEY", {}
        return json.loads(health.body)["status"], _counts(json.loads(stats.body))
    except (LaunchError, ValueError, LookupError, TypeError):
        return _SILENT, {}


def answers(url: str, key: str) -> bool:
    """Return whether a server is at a URL that says how it is, whatever it does. Loads no model for it."""
    try:
        health = ask(f"{url}/health", key, _PATIENCE_S)
        body = json.loads(health.body) if health and health.status in _HEALTH else None
    except (LaunchError, ValueError, RecursionError):
        return False
    return isinstance(body, dict) and isinstance(body.get("status"), str)


def _counts(stats: Mapping[str, Any]) -> dict[str, Any]:
    model, requests, cache = stats["server"]["model"], stats["requests"], stats["prompt_cache"]
    loaded = (entry["id"] for entry in stats["models"] if entry["state"] == "loaded")
    return {
        "model": model,
        "other_models": tuple(name for name in loaded if name != model),
        "memory": {
            "budget_bytes": stats["admission"]["memory_budget_bytes"],
            "weights_bytes": stats["admission"]["weights_bytes"],
            "cache_bytes": cache["bytes"],
            "cache_max_bytes": cache["max_bytes"],
        },
        "requests": {
            "answered": sum(requests["endings"].values()),
            "running": requests["in_flight"],
            "waiting": stats["engine"]["waiting"],
        },
        "tokens": {
            "prompt": requests["prompt_tokens"],
            "not_read_twice": requests["cached_tokens"],
            "generated": requests["completion_tokens"],
        },
    }


def _lines(status: ServerStatus) -> Iterator[str]:
    yield f"  server    {status.url}, {status.state}{_process(status)}"
    if status.proxy_url:
        yield f"  proxy     {status.proxy_url}"
    if status.model:
        yield f"  model     {', '.join([status.model, *status.other_models])}"
        yield f"  memory    {_memory_text(status.memory)}"
        yield f"  requests  {', '.join(f'{count:,} {name}' for name, count in status.requests.items())}"
        saved = f"{status.tokens['not_read_twice']:,} of {status.tokens['prompt']:,}"
        yield f"  tokens    {saved} prompt tokens were not read twice"
        yield f"  page      {status.url}/"


def _memory_text(memory: Mapping[str, int]) -> str:
    cache, most = binary_size(memory["cache_bytes"]), binary_size(memory["cache_max_bytes"])
    return f"weights {binary_size(memory['weights_bytes'])}, cache {cache} of {most}"


def _process(status: ServerStatus) -> str:
    if status.pid is None or status.started_at is None:
        return ""
    return f" (process {status.pid}, version {status.version}, for {_span(time.time() - status.started_at)})"


def _span(seconds: float) -> str:
    minutes, hours = divmod(int(seconds) // 60, 60)[::-1]
    if hours >= 48:
        return f"{hours // 24} days"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
