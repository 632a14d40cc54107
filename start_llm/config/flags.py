"""The table of flags that stand for variables: one row per flag. See `config.settings` for what they do."""

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from start_llm.config.paths import DEMO_MODEL
from start_llm.config.setting_types import OFF
from start_llm.config.settings import SettingSpec, all_rows
from start_llm.core.errors import SettingsError
from start_llm.core.named_paths import expanded

type Variables = Mapping[str, str]
"""Values of variables, as texts."""


MORE_MODELS = "MORE_MODELS"


class Flag(NamedTuple):
    """A flag with a value.

    Attributes:
        names: its spellings; of several on a command line the last counts.
        metavar: the placeholder of its value in the help text.
        variable: the setting that it stands for, or the first of them.
        read: returns the variables that a value stands for.
        values: what the help text says of the value, if it differs from the setting's.
    """

    names: tuple[str, ...]
    metavar: str
    variable: str
    read: Callable[[str], Variables]
    values: str = ""

    @property
    def attribute(self) -> str:
        """Where argparse keeps the value."""
        return _attribute(self.names[0])


def _flag(variable: str, metavar: str, *names: str) -> Flag:
    return Flag(names, metavar, variable, lambda text: {variable: text})


def _folder(variable: str, *names: str, no_folder: str | None = None) -> Flag:
    """A folder on the command line is seen from the folder that the command is called in.

    Args:
        no_folder: a word that names none.
    """

    def read(text: str) -> Variables:
        stays = text.startswith("~") or text.lower() == no_folder
        return {variable: text if stays else str(Path.cwd() / text)}

    return Flag(names, "FOLDER", variable, read)


def _prompt_cache(text: str) -> Variables:
    """A size turns the cache on. A bare number is in GiB, and 0 turns it off."""
    is_number = text.replace(".", "", 1).isdecimal()
    if is_number and not float(text):
        return {"PROMPT_CACHE": "false"}
    switch = {"on": "true", "true": "true", "off": "false", "false": "false"}.get(text.lower())
    if switch:
        return {"PROMPT_CACHE": switch}
    size = f"{text}GiB" if is_number else text
    return {"PROMPT_CACHE": "true", "PROMPT_CACHE_MAX_BYTES": size}


def _kv_quant(text: str) -> Variables:
    scheme, _, bits = text.lower().partition(":")
    if scheme in ("turbo", "turboquant"):
        return {"KV_QUANT_SCHEME": "turboquant", "KV_BITS": bits or "4"}
    return {"KV_BITS": text}


FLAGS: tuple[Flag, ...] = (
    _flag("MODEL_PATH", "PATH_OR_REPO", "--model"),
    _folder("MODEL_DIR", "--model-dir"),
    _flag("MODEL_PINS", "NAMES", "--pin"),
    _folder("ADAPTER_DIR", "--adapter-dir"),
    _flag("MLX_HOST", "ADDRESS", "--mlx-host"),
    _flag("MLX_PORT", "N", "--mlx-port", "--port"),
    _flag("PROXY_PORT", "N", "--proxy-port"),
    _flag("BATCH", "N", "--batch"),
    _flag("MEMORY_BUDGET", "SIZE", "--memory-budget"),
    _flag("MAX_KV_SIZE", "TOKENS", "--max-kv-size"),
    Flag(("--kv-quant",), "BITS", "KV_BITS", _kv_quant, "off, 4, 8, config, turbo (4 bits) or turbo:3.5."),
    Flag(
        ("--prompt-cache",),
        "SIZE",
        "PROMPT_CACHE",
        _prompt_cache,
        "on, off, or its size (PROMPT_CACHE_MAX_BYTES; a bare number is in GiB, 0 turns it off).",
    ),
    _flag("PROMPT_CACHE_MAX_BYTES", "SIZE", "--hot-cache-max-size"),
    _flag("INITIAL_CACHE_BLOCKS", "N", "--initial-cache-blocks"),
    _folder("SSD_CACHE_DIR", "--ssd-cache-dir", "--paged-ssd-cache-dir", no_folder=OFF),
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
    "--demo": ({"MODEL_PATH": str(DEMO_MODEL)}, "serve the demo model"),
    "--no-proxy": ({"PROXY": "false"}, "the server alone, without the LiteLLM proxy"),
    "--no-cache": ({"PROMPT_CACHE": "false"}, "compute every prompt anew"),
}
"""Flags without a value: the variables that they stand for, and what the help text says."""
_NAMES_A_FLAG = re.compile(r" --[a-z-]+(?: and --[a-z-]+)* says? the same\.")


def add_flags(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add the flags with these names; all flags and switches, by section, if none are given."""
    rows = {row.name: row for row in all_rows()}
    places = dict.fromkeys(dict.fromkeys(row.section for row in rows.values()), parser)
    if not names:
        used = {rows[flag.variable].section for flag in FLAGS}
        places |= {section: parser.add_argument_group(section) for section in places if section in used}
    for flag in FLAGS:
        if not names or flag.names[0] in names:
            row = rows[flag.variable]
            place = places[row.section]
            action = "append" if flag.variable == "MODEL_PATH" else "store"
            help_text = _help_text(flag, row)
            place.add_argument(
                *flag.names, action=action, dest=flag.attribute, metavar=flag.metavar, help=help_text
            )
    if not names:
        for name, (variables, help_text) in SWITCHES.items():
            section = rows[next(iter(variables))].section
            places[section].add_argument(name, action="store_true", help=help_text)


def _help_text(flag: Flag, row: SettingSpec) -> str:
    """Return the help text of a flag: the setting's own words, and its name with its default."""
    meaning = _NAMES_A_FLAG.sub("", f" {row.help}").strip()
    default = f"={row.default}" if row.default else ""
    return " ".join(filter(None, (flag.values, meaning, f"[{row.name}{default}]"))).replace("%", "%%")


def variables_of(options: argparse.Namespace) -> dict[str, str]:
    """Return the variables that the flags of a command line stand for.

    Raises:
        SettingsError: two flags contradict each other.
    """
    values: dict[str, tuple[str, str]] = {}
    for name, variables in _given(options):
        for variable, text in variables.items():
            other, before = values.setdefault(variable, (name, text))
            if before != text:
                raise SettingsError(f"{other} and {name} both say what {variable} is. Leave one of them out.")
    return {variable: text for variable, (_, text) in values.items()}


def words_of(options: argparse.Namespace) -> list[str]:
    """Return the flags of a command line as words that mean the same from any folder."""
    words: list[str] = []
    for flag in FLAGS:
        for text in _texts(flag, options):
            words += [flag.names[0], _from_anywhere(flag, text)]
    return words + [name for name in SWITCHES if getattr(options, _attribute(name), False)]


def _from_anywhere(flag: Flag, text: str) -> str:
    if flag.metavar == "FOLDER":
        return flag.read(text)[flag.variable]
    path = expanded(text)
    return str(path.absolute()) if flag.metavar == "PATH_OR_REPO" and path.exists() else text


def _attribute(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def _texts(flag: Flag, options: argparse.Namespace) -> list[str]:
    """Return the values of a flag on a command line; only --model may have several."""
    given: list[str] | str = getattr(options, flag.attribute, None) or []
    return [text.strip() for text in ([given] if isinstance(given, str) else given) if text]


def _given(options: argparse.Namespace) -> list[tuple[str, Variables]]:
    values = [(flag, _texts(flag, options)) for flag in FLAGS]
    given = [(flag.names[0], flag.read(texts[0])) for flag, texts in values if texts]
    given += [(flag.names[0], {MORE_MODELS: ",".join(texts[1:])}) for flag, texts in values if texts[1:]]
    return given + [
        (name, variables)
        for name, (variables, _) in SWITCHES.items()
        if getattr(options, _attribute(name), False)
    ]
