"""Say whether a client suits a model: its own prompt must be shown whole, and fit half of the window."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, islice

from start_llm.launch.clients import CLIENTS, Client

type CountTokens = Callable[[str, str], int | None]
"""Returns the tokens of a prompt, given its system text and a tool's description; None if nobody knows."""

_SENTENCE = (
    "Before you edit a file, read the part that you change, and keep the style of the code around it; "
    "when a command fails, say what it printed and what you will try next. "
)
_LAST_CHARACTERS = 400
_LEAST_SHOWN = 40
"""Tokens that the last characters of a text have at least, if the template shows them."""


def unsuited(client: Client, window: int, count: CountTokens) -> str:
    """Return why a client does not suit a model; empty if it does, or nobody can tell.

    Args:
        window: the model's, in tokens.
        count: counts as the model does.
    """
    system, tools = client.prompt
    whole, shortened = (count(_text(length), "") for length in (system, system - _LAST_CHARACTERS))
    if whole is None or shortened is None:
        return ""
    if whole - shortened < _LEAST_SHOWN:
        return "the model's template cuts the client's own prompt off"
    total = count(_text(system), _text(tools))
    if total is None or 2 * total <= window:
        return ""
    return f"the client's own prompt has about {total:,} tokens, and the window {window:,}"


def unsuited_clients(window: int, count: CountTokens) -> dict[str, str]:
    """Return the clients that do not suit a model, and why."""
    found = {name: unsuited(client, window, count) for name, client in CLIENTS.items()}
    return {name: why for name, why in found.items() if why}


def _text(characters: int) -> str:
    return "".join(islice(cycle(_SENTENCE), characters))
