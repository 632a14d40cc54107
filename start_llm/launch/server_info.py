"""Find the running server, and read its model and limits from `/v1/models`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from start_llm.config.paths import servers_folder
from start_llm.config.settings import Settings
from start_llm.core.errors import LaunchError
from start_llm.launch.http_requests import LOOPBACK, NO_KEY, Address, ask, count_tokens, positive_numbers
from start_llm.storage.running_servers import RunningServer, running_servers

_LOAD_S = 3600.0
_WINDOW_NAMES = ("context_window", "max_input_tokens", "max_model_len", "context_length")
_REPLY_NAMES = ("max_output_tokens",)
_VISION_NAMES = ("vision", "supports_vision")
_REFUSALS: Mapping[int, str] = {
    401: "does not take the key: set PROXY_API_KEY or MLX_API_KEY to the server's"
}
_PARTS_OF_THE_WINDOW = 4
_LONGEST_REPLY = 32_000


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedModel:
    """A model that a client can choose; see `ServerInfo` for the attributes."""

    name: str
    window: int
    reply: int
    sees: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """A running server, as a client's configuration needs it.

    Attributes:
        url: its address without `/v1`.
        key: the API key, or a placeholder, because no client starts without one.
        model: the name of the model to use.
        window: the context window, prompt and reply together, in tokens.
        reply: the longest reply to ask for, in tokens. Clients keep this part of the window free.
        sees: the model sees images.
        others: the server's other models.
    """

    url: str
    key: str
    model: str
    window: int
    reply: int
    sees: bool = False
    others: tuple[OfferedModel, ...] = ()

    @property
    def models(self) -> tuple[OfferedModel, ...]:
        """All models, the one to use first."""
        used = OfferedModel(name=self.model, window=self.window, reply=self.reply, sees=self.sees)
        return (used, *self.others)

    @property
    def is_local(self) -> bool:
        return urlsplit(self.url).hostname in LOOPBACK


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
    own = own_url(settings.server.host, settings.server.port)
    proxy = [Address(f"http://127.0.0.1:{settings.proxy.port}", keys.proxy)] if settings.proxy.is_on else []
    running_addresses: list[Address] = []
    for server in sorted(running, key=lambda server: server.url != own):
        running_addresses += [Address(server.proxy_url, keys.proxy)] if server.proxy_url else []
        running_addresses.append(Address(server.url, keys.own))
    return list(dict.fromkeys([*running_addresses, *proxy, Address(own, keys.own)]))


def address_at(base_url: str, settings: Settings, running: Sequence[RunningServer] = ()) -> Address:
    """Return the address that the user names, with the key for it."""
    bare, keys = base_url.rstrip("/").removesuffix("/v1"), _Keys.of(settings)
    own_ports = {settings.server.port, *(server.port for server in running)}
    return Address(bare, keys.own if any(bare.endswith(f":{port}") for port in own_ports) else keys.proxy)


class _Keys(NamedTuple):
    own: str
    proxy: str

    @classmethod
    def of(cls, settings: Settings) -> _Keys:
        own = next(iter(settings.access.keys), NO_KEY)
        return cls(own, next(iter(settings.proxy.keys), own))


def servers_of(settings: Settings) -> list[RunningServer]:
    """Return the servers that run with this STATE_ROOT.

    Raises:
        LaunchError: the folder with their files cannot be read.
    """
    folder = servers_folder(settings.server.state_root)
    try:
        return running_servers(folder)
    except OSError as error:
        raise LaunchError(f"{error.filename or folder} cannot be read: {error.strerror}.") from None


type Say = Callable[[str], None]


def find_running(
    settings: Settings, base_url: str | None = None, model: str | None = None, say: Say = print
) -> ServerInfo:
    """Return the server to use.

    Args:
        base_url: its address, if the user names it.
        model: the model to use; None: the one that was used last.
        say: called before a model is loaded.

    Raises:
        LaunchError: there is none, it still loads its model, or it has no such model.
    """
    running = servers_of(settings)
    if base_url:
        return find([address_at(base_url, settings, running)], model, say)
    if running and all(server.is_loading for server in running):
        raise LaunchError(
            f"The server at {running[0].url} still loads its model. Try again when it says that it is ready."
        )
    return find(addresses(settings, [server for server in running if not server.is_loading]), model, say)


def find(places: Sequence[Address], model: str | None = None, say: Say = print) -> ServerInfo:
    """Return the server at the first address that answers. It loads the model if it has not done so.

    Raises:
        LaunchError: no address answers, the key is refused, there is no such model, or none with a window.
    """
    for url, key in places:
        body = _body_at(f"{url}/v1/models", key)
        if body is not None:
            return _served(Address(url, key), body, model, say)
    raise LaunchError(
        f"No server answers at {' or '.join(place.url for place in places)}. Start one "
        "(python3 install_and_run.py, or start_llm serve) and wait until it says that it answers, or name "
        "its address with --base-url."
    )


def _body_at(url: str, key: str) -> bytes | None:
    """Return the body at a URL; None if nothing listens there.

    Raises:
        LaunchError: the status is an error, the URL is invalid, or the answer is not valid HTTP.
    """
    answer = ask(url, key)
    if answer is None or answer.status < 400:
        return answer and answer.body
    raise LaunchError(f"{url} {_REFUSALS.get(answer.status, 'refuses')} ({answer.status}).")


def _served(place: Address, body: bytes, wanted: str | None, say: Say) -> ServerInfo:
    """Return the server with the model that is wanted, else the first of its list, which was used last."""
    entry = _entry(place, body, wanted)
    if "state" in entry and (_window(entry) is None or entry["state"] == "available"):
        say(f"The server loads {entry['id']} ...")
        count_tokens(place, entry["id"], "", patience_s=_LOAD_S)
        body = _body_at(f"{place.url}/v1/models", place.key) or body
        entry = _entry(place, body, wanted)
    window = _window(entry)
    if window is None:
        raise _no_model(place, body)
    reply = reply_limit(window, next(positive_numbers(entry, _REPLY_NAMES), window))
    others = tuple(_others(_entries(place, body), entry, window))
    return ServerInfo(
        url=place.url,
        key=place.key,
        model=entry["id"],
        window=window,
        reply=reply,
        sees=_sees(entry),
        others=others,
    )


def _entries(place: Address, body: bytes) -> Sequence[Mapping[str, Any]]:
    """Return the models of a list that have a name."""
    try:
        listed = [
            entry for entry in json.loads(body)["data"] if isinstance(entry, dict) and _is_name(entry["id"])
        ]
    except (ValueError, LookupError, TypeError):
        listed = []
    if not listed:
        raise _no_model(place, body)
    return listed


def _no_model(place: Address, body: bytes) -> LaunchError:
    beginning = body[:80].decode(errors="replace")
    return LaunchError(
        f"{place.url}/v1/models names no model with a context window, as this server does. "
        f"It says: {beginning}"
    )


def _entry(place: Address, body: bytes, wanted: str | None) -> Mapping[str, Any]:
    """Return the entry of a model, by its name, an alias, or what follows its owner's name."""
    entries = _entries(place, body)
    if wanted is None:
        return entries[0]
    for names in (_names, lambda entry: [entry["id"].rpartition("/")[2]]):
        matching = [entry for entry in entries if wanted in names(entry)]
        if len(matching) == 1:
            return matching[0]
    there = ", ".join(entry["id"] for entry in entries)
    raise LaunchError(f"The server at {place.url} has no model {wanted!r}. It has: {there}.")


def _names(entry: Mapping[str, Any]) -> list[str]:
    aliases = entry.get("aliases")
    return [entry["id"], *(aliases if isinstance(aliases, list) else [])]


def _others(
    entries: Sequence[Mapping[str, Any]], used: Mapping[str, Any], window: int
) -> Iterator[OfferedModel]:
    """Yield the other models. Of one that was never loaded nobody knows the window: it gets the smallest.

    With too small a window a client compacts early, with one too large it is refused.
    """
    smallest = min([window, *(known for entry in entries if (known := _window(entry)))])
    for other in entries:
        if other["id"] != used["id"]:
            size = _window(other) or smallest
            reply = reply_limit(size, next(positive_numbers(other, _REPLY_NAMES), size))
            yield OfferedModel(name=other["id"], window=size, reply=reply, sees=_sees(other))


def _window(entry: Mapping[str, Any]) -> int | None:
    return next(positive_numbers(entry, _WINDOW_NAMES), None)


def _sees(entry: Mapping[str, Any]) -> bool:
    return any(entry.get(name) is True for name in _VISION_NAMES)


def _is_name(value: Any) -> bool:
    """Control characters make no name: it is printed on a terminal, in lines to paste into a shell."""
    return isinstance(value, str) and value.isprintable()


def reply_limit(window: int, most: int) -> int:
    """Return the longest reply to ask for: a quarter of the window, at most `most` and 32,000 tokens.

    The server would let a reply use all that the prompt leaves. But a client compacts when the prompt leaves
    less than the longest reply, so with the whole window it would compact all the time.
    """
    return max(min(most, window // _PARTS_OF_THE_WINDOW, _LONGEST_REPLY), 1)
