"""The table of flags that stand for variables: one row per flag. See `config.settings` for what they do."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import NamedTuple

from start_llm.core.errors import SettingsError

type Variables = Mapping[str, str]
"""Values of variables, as texts."""


class Flag(NamedTuple):
    """A flag with a value.

    Attributes:
        names: its spellings; of several on a command line the last counts.
        metavar: the placeholder of its value in the help text.
        help: what the help text says.
        read: returns the variables that a value stands for.
    """

    names: tuple[str, ...]
    metavar: str
    help: str
    read: Callable[[str], Variables]

    @property
    def attribute(self) -> str:
        """Where argparse keeps the value."""
        return self.names[0].removeprefix("--").replace("-", "_")


def _flag(variable: str, metavar: str, *names: str) -> Flag:
    told = f"wins over {variable} in the environment and .env"
    return Flag(names, metavar, told, lambda text: {variable: text})


def _prompt_cache(text: str) -> Variables:
    """A size turns the cache on. A bare number is in GiB, and 0 turns it off."""
    switch = {"on": "true", "true": "true", "off": "false", "false": "false", "0": "false"}.get(text.lower())
    if switch:
        return {"PROMPT_CACHE": switch}
    size = f"{text}GiB" if text.replace(".", "", 1).isdecimal() else text
    return {"PROMPT_CACHE": "true", "PROMPT_CACHE_MAX_BYTES": size}


def _kv_quant(text: str) -> Variables:
    return {"KV_QUANT_SCHEME": "turboquant"} if text.lower().startswith("turbo") else {"KV_BITS": text}


FLAGS: tuple[Flag, ...] = (
    _flag("MODEL_PATH", "PATH_OR_REPO", "--model"),
    _flag("MODEL_DIR", "FOLDER", "--model-dir"),
    _flag("MODEL_PINS", "NAMES", "--pin"),
    _flag("ADAPTER_DIR", "FOLDER", "--adapter-dir"),
    _flag("MLX_HOST", "ADDRESS", "--mlx-host"),
    _flag("MLX_PORT", "N", "--mlx-port", "--port"),
    _flag("PROXY_PORT", "N", "--proxy-port"),
    _flag("BATCH", "N", "--batch"),
    _flag("MEMORY_BUDGET", "SIZE", "--memory-budget"),
    _flag("MAX_KV_SIZE", "TOKENS", "--max-kv-size"),
    Flag(
        ("--kv-quant",),
        "BITS",
        "off, 4 or 8; wins over KV_BITS in the environment and .env",
        _kv_quant,
    ),
    Flag(
        ("--prompt-cache",),
        "SIZE",
        "on, off, or its size (a bare number is in GiB, 0 turns it off); wins over PROMPT_CACHE and "
        "PROMPT_CACHE_MAX_BYTES in the environment and .env",
        _prompt_cache,
    ),
    _flag("PROMPT_CACHE_MAX_BYTES", "SIZE", "--hot-cache-max-size"),
    _flag("INITIAL_CACHE_BLOCKS", "N", "--initial-cache-blocks"),
    _flag("SSD_CACHE_DIR", "FOLDER", "--ssd-cache-dir", "--paged-ssd-cache-dir"),
    _flag("SSD_CACHE_MAX_SIZE", "SIZE", "--ssd-cache-max-size", "--paged-ssd-cache-max-size"),
    _flag("DEFAULT_THINKING", "on|off", "--thinking"),
    _flag("DEFAULT_MAX_TOKENS", "N", "--max-tokens"),
    _flag("DEFAULT_TEMPERATURE", "T", "--temperature", "--temp"),
    _flag("DEFAULT_TOP_P", "P", "--top-p"),
    _flag("DEFAULT_TOP_K", "N", "--top-k"),
    _flag("DEFAULT_MIN_P", "P", "--min-p"),
    _flag("HLG_SAMPLING", "on|off", "--hlg-sampling"),
    _flag("HLG_WIDTH", "NATS", "--hlg-width"),
    _flag("HLG_SHOULDER", "NATS", "--hlg-shoulder"),
    _flag("HLG_TOE", "NATS", "--hlg-toe"),
    _flag("HLG_PIVOT_OFFSET", "NATS", "--hlg-pivot-offset"),
)
SWITCHES: Mapping[str, tuple[Variables, str]] = {
    "--no-proxy": ({"PROXY": "false"}, "the server alone, without the LiteLLM proxy"),
    "--no-cache": ({"PROMPT_CACHE": "false"}, "compute every prompt anew"),
}
"""Flags without a value: the variables that they stand for, and what the help text says."""


def add_flags(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add the flags with these names; all flags and switches if none are given."""
    for flag in FLAGS:
        if not names or flag.names[0] in names:
            parser.add_argument(*flag.names, dest=flag.attribute, metavar=flag.metavar, help=flag.help)
    if not names:
        for name, (_, told) in SWITCHES.items():
            parser.add_argument(name, action="store_true", help=told)


def variables_of(options: argparse.Namespace) -> dict[str, str]:
    """Return the variables that the flags of a command line stand for.

    Raises:
        SettingsError: two flags contradict each other.
    """
    found: dict[str, tuple[str, str]] = {}
    for name, variables in _given(options):
        for variable, text in variables.items():
            other, before = found.setdefault(variable, (name, text))
            if before != text:
                raise SettingsError(f"{other} and {name} both say what {variable} is. Leave one of them out.")
    return {variable: text for variable, (_, text) in found.items()}


def _given(options: argparse.Namespace) -> list[tuple[str, Variables]]:
    values = [(flag.names[0], flag.read, getattr(options, flag.attribute, None)) for flag in FLAGS]
    given = [(name, read(text.strip())) for name, read, text in values if text]
    return given + [
        (name, variables)
        for name, (variables, _) in SWITCHES.items()
        if getattr(options, name.removeprefix("--").replace("-", "_"), False)
    ]
