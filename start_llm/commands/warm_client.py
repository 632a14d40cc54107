"""`start_llm warm CLIENT`: has the server read what the client's conversations begin with."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from start_llm.core.errors import LaunchError
from start_llm.launch.clients import CLIENTS
from start_llm.launch.http_requests import HttpAnswer, ask
from start_llm.launch.server_info import ServerInfo

_PATIENCE_S = 3600.0
"""Seconds: what the disk has lost is computed, behind everything that somebody waits for."""


def warm_lines(name: str, served: ServerInfo) -> Iterator[str]:
    """Yield a line for each beginning that is in memory then.

    Raises:
        LaunchError: the server does not answer, or refuses it.
    """
    asked = {"model": served.model, "programs": list(CLIENTS[name].programs)}
    answer = ask(f"{served.url}/v1/cache/warm", served.key, _PATIENCE_S, asked)
    beginnings = _beginnings(answer, served.url)
    if not beginnings:
        yield f"{served.url} has answered no conversation of {name} with this key and {served.model} yet."
    for beginning in beginnings:
        parts = ("in memory already", "from_memory"), ("from the disk", "from_disk"), ("computed", "read")
        sources = ", ".join(f"{beginning[part]:,} {words}" for words, part in parts if beginning[part])
        yield f"{beginning['prompt_tokens'] - 1:,} tokens of {name} are in memory: {sources}."


def _beginnings(answer: HttpAnswer | None, url: str) -> list[Mapping[str, Any]]:
    if answer is None:
        raise LaunchError(f"{url} does not answer.")
    try:
        body = json.loads(answer.body)
        if answer.status != 200:
            raise LaunchError(f"{url} refuses it: {body['error']['message']}")
        return body["beginnings"]
    except (ValueError, LookupError, TypeError):
        raise LaunchError(f"{url} is no server that reads beginnings: {answer.status}.") from None
