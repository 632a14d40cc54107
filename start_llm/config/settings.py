"""The settings, in groups that are handed to the parts. They are read once, at start, and never change.

A value comes from a command-line flag, else from the environment, else from `.env`. An empty value counts as
unset. `.env.example` and the table in `docs/settings.md` are made from the rows (see `config.documents`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from start_llm.config.prompt_variables import (
    CacheSettings,
    ImageSettings,
    KVSettings,
    PromptSettings,
    ReplySettings,
    SamplingSettings,
    SSDSettings,
)
from start_llm.config.server_variables import (
    AccessSettings,
    EngineSettings,
    HttpSettings,
    LogSettings,
    ModelSettings,
    ProxySettings,
    ResponseSettings,
    ServerSettings,
)
from start_llm.config.setting_types import TEXT
from start_llm.config.variable import SettingSpec
from start_llm.core.errors import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings. A group that is a record of the core goes to its part as it is."""

    model: ModelSettings = field(default_factory=ModelSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    access: AccessSettings = field(default_factory=AccessSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    http: HttpSettings = field(default_factory=HttpSettings)
    responses: ResponseSettings = field(default_factory=ResponseSettings)
    proxy: ProxySettings = field(default_factory=ProxySettings)
    kv: KVSettings = field(default_factory=KVSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    ssd: SSDSettings = field(default_factory=SSDSettings)
    prompt: PromptSettings = field(default_factory=PromptSettings)
    images: ImageSettings = field(default_factory=ImageSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    reply: ReplySettings = field(default_factory=ReplySettings)
    log: LogSettings = field(default_factory=LogSettings)

    @classmethod
    def rows(cls) -> Iterator[SettingSpec]:
        """Yield the row of every variable that has an effect."""
        for name, group in _groups().items():
            for slot in fields(group):
                if row := slot.metadata.get("row"):
                    yield row._replace(section=group.section, group=name, field=slot.name)

    @classmethod
    def of(cls, values: Mapping[str, Mapping[str, Any]]) -> Settings:
        """Return settings with these values of fields, by the names of their groups."""
        groups = _groups()
        return cls(**{name: groups[name](**chosen) for name, chosen in values.items()})


def _groups() -> dict[str, Any]:
    """Return the classes of the groups."""
    return {slot.name: slot.default_factory for slot in fields(Settings)}


@dataclass(frozen=True, slots=True)
class SettingSource:
    """A source of values: its name for error messages, and its variables."""

    name: str
    variables: Mapping[str, str]


ENV_SOURCE = ".env"
"""The name of the source that is the file."""


def load(*sources: SettingSource) -> Settings:
    """Read the settings from several sources, the strongest first.

    Raises:
        SettingsError: names every variable with an invalid value, and the values that it expects.
    """
    values: dict[str, dict[str, Any]] = defaultdict(dict)
    problems: list[str] = []
    for row in Settings.rows():
        setting = _find(row.name, sources)
        if setting is None:
            continue
        text, source = setting
        try:
            values[row.group][row.field] = row.kind.read(text)
        except (ValueError, KeyError):
            shown = "..." if row.kind.is_secret else repr(text)
            problems.append(f"{row.name}={shown} ({source}): expected {row.kind.expected}.")
    if problems:
        raise SettingsError("\n".join(problems))
    return Settings.of(values)


def set_without_effect(*sources: SettingSource) -> list[SettingSpec]:
    """Return the variables that are set and have no effect, so that the user can be warned."""
    return [row for row in WITHOUT_EFFECT if _find(row.name, sources) is not None]


def _find(name: str, sources: tuple[SettingSource, ...]) -> tuple[str, str] | None:
    for source in sources:
        text = source.variables.get(name, "").strip()
        if text:
            return text, source.name
    return None


# Variables of the project's first documents that have nothing to choose here.
WITHOUT_EFFECT: tuple[SettingSpec, ...] = (
    SettingSpec("PROMPT_CACHE_MAX_ENTRIES_PER_SESSION", TEXT, "2",
        "Titles, sub-agents and branches share a session's id, so no session has a limit of its own; memory "
        "and PROMPT_CACHE_MAX_ENTRIES_GLOBAL decide for all together.", CacheSettings.section,
    ),
    SettingSpec("CACHE_USE_BLOCK_INDEX", TEXT, "true",
        "Pages are looked up by chain hash; there is no other way.", CacheSettings.section,
    ),
)  # fmt: skip


def all_rows() -> list[SettingSpec]:
    """Return every row, grouped by section in the order in which sections first appear."""
    rows = [*Settings.rows(), *WITHOUT_EFFECT]
    sections = list(dict.fromkeys(row.section for row in rows))
    return sorted(rows, key=lambda row: sections.index(row.section))
