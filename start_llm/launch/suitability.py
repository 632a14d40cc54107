"""List the clients, and say which suit a model: their prompt must be shown whole, and fit half the window."""

import shutil
from collections.abc import Callable, Container, Iterator, Mapping
from functools import partial
from itertools import cycle, islice

from start_llm.launch.client import Client
from start_llm.launch.clients import CLIENTS

type CountTokens = Callable[[str], int | None]
"""Returns the tokens of a prompt, given its system text; None if nobody knows."""

_SENTENCE = (
    "Before you edit a file, read the part that you change, and keep the style of the code around it; "
    "when a command fails, say what it printed and what you will try next. "
)
_LAST_CHARACTERS = 400
_LEAST_SHOWN = 40
"""Tokens that the last characters of a text have at least, if the template shows them."""


def judge(window: int, count: CountTokens) -> Callable[[Client], str]:
    """Return what tells why a client does not suit a model: empty if it does, or nobody can tell.

    Where the template shows the longest of their prompts whole, that one alone is counted: all are alike.

    Args:
        window: the model's, in tokens.
        count: counts as the model does.
    """
    longest = max(CLIENTS.values(), key=lambda client: client.prompt.system)
    whole = count(_text(longest.prompt.system))
    if _is_cut_off(longest, whole, count):
        return partial(_judged_by_itself, window, count)
    return partial(_too_long, window, whole, longest.prompt.system)


def unsuited_clients(window: int, count: CountTokens) -> dict[str, str]:
    """Return the clients that do not suit a model, and why: see `judge`."""
    reason = judge(window, count)
    return {name: why for name, client in CLIENTS.items() if (why := reason(client))}


def _judged_by_itself(window: int, count: CountTokens, client: Client) -> str:
    whole = count(_text(client.prompt.system))
    if _is_cut_off(client, whole, count):
        return "the model's template cuts the client's own prompt off"
    return _too_long(window, whole, client.prompt.system, client)


def _too_long(window: int, tokens: int | None, characters: int, client: Client) -> str:
    """Return why a client's prompt is too long, where so many characters have so many tokens."""
    total = round((tokens or 0) * sum(client.prompt) / characters)
    if 2 * total <= window:
        return ""
    return f"the client's own prompt has about {total:,} tokens, and the window {window:,}"


def _is_cut_off(client: Client, whole: int | None, count: CountTokens) -> bool:
    """Return True if a template shows nothing of the end of a system text as long as the client's.

    Args:
        whole: the tokens of that text.
    """
    shortened = count(_text(client.prompt.system - _LAST_CHARACTERS))
    return whole is not None and shortened is not None and whole - shortened < _LEAST_SHOWN


def _text(characters: int) -> str:
    return "".join(islice(cycle(_SENTENCE), characters))


def is_installed(name: str, path: str | None) -> bool:
    """Return whether the client's program is found.

    Args:
        path: the folders with programs, as in PATH.
    """
    return shutil.which(CLIENTS[name].command, path=path) is not None


def menu(inherited: Mapping[str, str], unsuited: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each client with what to do to start it, and below it why it does not suit the model.

    Args:
        unsuited: the clients that do not suit the model, and why.
    """
    path = inherited.get("PATH")
    for name, client in CLIENTS.items():
        is_there = is_installed(name, path)
        yield name, f"start_llm launch {name}" if is_there else f"not installed; {client.install}"
        if name in unsuited:
            yield "", f"does not suit the model: {unsuited[name]}"


def suggested(inherited: Mapping[str, str], unsuited: Container[str]) -> list[str]:
    """Return the words of a command to try: start an installed client that suits, else list all clients.

    Args:
        unsuited: the clients that do not suit the model.
    """
    path = inherited.get("PATH")
    installed = (name for name in CLIENTS if name not in unsuited and is_installed(name, path))
    name = next(installed, None)
    return ["launch", name] if name else ["clients"]
