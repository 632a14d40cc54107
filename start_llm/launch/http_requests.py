"""Ask a running server over HTTP."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from start_llm.core.errors import LaunchError

NO_KEY = "local"
"""What is sent as a key if none is set."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_ASK_S = 15.0
_MAX_BYTES = 2**20


class Address(NamedTuple):
    """An address at which a server may answer, and the key for it."""

    url: str
    key: str


class HttpAnswer(NamedTuple):
    """What a server answers to a GET."""

    status: int
    body: bytes


def ask(url: str, key: str, patience_s: float = _ASK_S, body: Any = None) -> HttpAnswer | None:
    """Return the answer at a URL, errors included; None if nothing listens there.

    Args:
        body: is posted as JSON; None: a GET.

    Raises:
        LaunchError: the URL is invalid, or the answer is not valid HTTP.
    """
    try:
        with closing(_open(url, key, patience_s, body)) as reply:
            return HttpAnswer(reply.status, reply.read(_MAX_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            return HttpAnswer(error.code, error.read(_MAX_BYTES))
    except urllib.error.URLError:
        return None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise LaunchError(f"{url} gives no answer of a server: {error}.") from None


def _open(url: str, key: str, patience_s: float, body: Any) -> Any:
    if urlsplit(url).scheme not in ("http", "https"):
        raise ValueError("an address begins with http:// or https://")
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    posted = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=posted, headers=headers)  # noqa: S310 - see above
    # A proxy in the environment is for the internet; it cannot reach a server on this machine.
    proxies = {} if urlsplit(url).hostname in LOOPBACK else None
    opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))
    return opener.open(request, timeout=patience_s)


def count_tokens(place: Address, model: str, system: str, patience_s: float = _ASK_S) -> int | None:
    """Return the tokens of a prompt with a system text; None if nobody tells.

    The server loads the model for it.
    """
    asked = {"model": model, "system": system, "messages": [{"role": "user", "content": "Hello"}]}
    try:
        answer = ask(f"{place.url}/v1/messages/count_tokens", place.key, patience_s, asked)
        return next(positive_numbers(json.loads(answer.body), ("input_tokens",)), None) if answer else None
    except (LaunchError, ValueError, AttributeError):
        return None


def positive_numbers(entry: Mapping[str, Any], names: Sequence[str]) -> Iterator[int]:
    """Yield the members of an object with these names that are positive integers."""
    for name in names:
        value = entry.get(name)
        if isinstance(value, int) and value > 0:
            yield value
