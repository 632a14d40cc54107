"""Find the running server, and read its model and limits from `/v1/models`."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from start_llm.config.paths import servers_folder
from start_llm.config.settings import Settings
from start_llm.core.errors import LaunchError
from start_llm.core.running_servers import RunningServer, running_servers

NO_KEY = "local"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_ASK_S = 15.0
_MAX_BYTES = 2**20
_WINDOW_NAMES = ("context_window", "max_input_tokens", "max_model_len", "context_length")
_REPLY_NAMES = ("max_output_tokens",)
_VISION_NAMES = ("vision", "supports_vision")
_REFUSALS: Mapping[int, str] = {
    401: "does not take the key: set PROXY_API_KEY or MLX_API_KEY to the server's"
}
_PARTS_OF_THE_WINDOW = 4
_LONGEST_REPLY = 32_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """A running server, as a client's configuration needs it.

    Attributes:
        url: its address without `/v1`.
        key: the API key, or a placeholder, because no client starts without one.
        model: the model's name.
        window: the context window, prompt and reply together, in tokens.
        reply: the longest reply to ask for, in tokens. Clients keep this part of the window free.
        sees: the model sees images.
    """

    url: str
    key: str
    model: str
    window: int
    reply: int
    sees: bool = False

    @property
    def is_local(self) -> bool:
        return urlsplit(self.url).hostname in LOOPBACK


class Address(NamedTuple):
    """An address at which a server may answer, and the key for it."""

    url: str
    key: str


def own_url(host: str, port: int) -> str:
    """Return the URL by which this machine reaches a server that listens on `host` and `port`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def addresses(settings: Settings, running: Sequence[RunningServer] = ()) -> list[Address]:
    """Return the addresses at which a server may answer, the most likely first.

    Those are the addresses of running servers, first of the one that has the port of the settings, then those
    that the settings name. Of each server the proxy's address comes first.
    """
    keys = _Keys.of(settings)
    own = own_url(settings.mlx_host, settings.mlx_port)
    proxy = [Address(f"http://127.0.0.1:{settings.proxy_port}", keys.proxy)] if settings.proxy else []
    found: list[Address] = []
    for server in sorted(running, key=lambda server: server.url != own):
        found += [Address(server.proxy_url, keys.proxy)] if server.proxy_url else []
        found.append(Address(server.url, keys.own))
    return list(dict.fromkeys([*found, *proxy, Address(own, keys.own)]))


def address_at(base_url: str, settings: Settings, running: Sequence[RunningServer] = ()) -> Address:
    """Return the address that the user names, with the key for it."""
    bare, keys = base_url.rstrip("/").removesuffix("/v1"), _Keys.of(settings)
    own_ports = {settings.mlx_port, *(server.port for server in running)}
    return Address(bare, keys.own if any(bare.endswith(f":{port}") for port in own_ports) else keys.proxy)


class _Keys(NamedTuple):
    own: str
    proxy: str

    @classmethod
    def of(cls, settings: Settings) -> _Keys:
        own = next(iter(settings.keys), NO_KEY)
        return cls(own, next(iter(settings.proxy_keys), own))


def servers_of(settings: Settings) -> list[RunningServer]:
    """Return the servers that run with this STATE_ROOT.

    Raises:
        LaunchError: the folder with their files cannot be read.
    """
    folder = servers_folder(settings.state_root)
    try:
        return running_servers(folder)
    except OSError as error:
        raise LaunchError(f"{error.filename or folder} cannot be read: {error.strerror}.") from None


def find_running(settings: Settings, base_url: str | None = None) -> ServerInfo:
    """Return the server to use.

    Args:
        base_url: its address, if the user names it.

    Raises:
        LaunchError: there is none, or it still loads its model.
    """
    running = servers_of(settings)
    if base_url:
        return find([address_at(base_url, settings, running)])
    if running and all(server.is_loading for server in running):
        raise LaunchError(
            f"The server at {running[0].url} still loads its model. Try again when it says that it is ready."
        )
    return find(addresses(settings, [server for server in running if not server.is_loading]))


def find(places: Sequence[Address]) -> ServerInfo:
    """Return the server at the first address that answers.

    Raises:
        LaunchError: no address answers, the key is refused, or the answer has no model with a window.
    """
    for url, key in places:
        told = _told(f"{url}/v1/models", key)
        if told is not None:
            return _served(url, key, told)
    raise LaunchError(
        f"No server answers at {' or '.join(one.url for one in places)}. Start one "
        "(python install_and_run.py, or start_llm serve) and wait until it says that it answers, or name its "
        "address with --base-url."
    )


def _told(url: str, key: str) -> bytes | None:
    """Return the body at a URL; None if nothing listens there.

    Raises:
        LaunchError: the status is an error, the URL is invalid, or the answer is not valid HTTP.
    """
    answer = ask(url, key)
    if answer is None or answer.status < 400:
        return answer and answer.body
    raise LaunchError(f"{url} {_REFUSALS.get(answer.status, 'refuses')} ({answer.status}).")


class HttpAnswer(NamedTuple):
    """What a server answers to a GET."""

    status: int
    body: bytes


def ask(url: str, key: str, patience_s: float = _ASK_S) -> HttpAnswer | None:
    """Return the answer at a URL, errors included; None if nothing listens there.

    Raises:
        LaunchError: the URL is invalid, or the answer is not valid HTTP.
    """
    try:
        with closing(_open(url, key, patience_s)) as reply:
            return HttpAnswer(reply.status, reply.read(_MAX_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            return HttpAnswer(error.code, error.read(_MAX_BYTES))
    except urllib.error.URLError:
        return None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise LaunchError(f"{url} gives no answer of a server: {error}.") from None


def _open(url: str, key: str, patience_s: float) -> Any:
    if urlsplit(url).scheme not in ("http", "https"):
        raise ValueError("an address begins with http:// or https://")
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})  # noqa: S310 - see above
    # A proxy in the environment is for the internet; it cannot reach a server on this machine.
    proxies = {} if urlsplit(url).hostname in LOOPBACK else None
    opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))
    return opener.open(request, timeout=patience_s)


def _served(url: str, key: str, told: bytes) -> ServerInfo:
    """Return the first model of the list. This server has one model, and its proxy lists that one first."""
    try:
        entry = json.loads(told)["data"][0]
        model, window = _name(entry["id"]), next(_numbers(entry, _WINDOW_NAMES))
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration):
        beginning = told[:80].decode(errors="replace")
        raise LaunchError(
            f"{url}/v1/models names no model with a context window, as this server does. It says: {beginning}"
        ) from None
    most = next(_numbers(entry, _REPLY_NAMES), window)
    sees = any(entry.get(name) is True for name in _VISION_NAMES)
    return ServerInfo(
        url=url, key=key, model=model, window=window, reply=reply_limit(window, most), sees=sees
    )


def _name(said: str) -> str:
    """Refuse a name with control characters: it is printed on a terminal, in lines to paste into a shell."""
    if not said.isprintable():
        raise ValueError(said)
    return said


def _numbers(entry: Mapping[str, Any], names: Sequence[str]) -> Iterator[int]:
    for name in names:
        value = entry.get(name)
        if isinstance(value, int) and value > 0:
            yield value


def reply_limit(window: int, most: int) -> int:
    """Return the longest reply to ask for: a quarter of the window, at most `most` and 32,000 tokens.

    The server would let a reply use all that the prompt leaves. But a client compacts when the prompt leaves
    less than the longest reply, so with the whole window it would compact all the time.
    """
    return max(min(most, window // _PARTS_OF_THE_WINDOW, _LONGEST_REPLY), 1)
